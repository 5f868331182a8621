"""Research of your own, in a package of your own: Tekso is not changed for it.

cd docs/examples
tekso-trainer --import=my_research --model=my_research.experiments.Blended --logdir=/tmp/blended
"""
