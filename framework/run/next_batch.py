"""Takes the next batches of the training input, which may not come."""

from __future__ import annotations

from collections.abc import Callable

from tekso.framework import watchdog
from tekso.framework.run.batch_groups import Batch


def next_batches(
    take: Callable[[], list[Batch]],
    step: int,
    *,
    is_first: bool,
    save: Callable[[], None] | None,
) -> list[Batch]:
    """Returns the batches of the next steps, at least one.

    Args:
      take: takes them from the training input; [] at its end.
      step: steps done.
      is_first: whether it is the first batch of this process, which may take longer.
      save: saves the state before an error about a batch that does not come; None: it cannot.

    Raises:
      StalledError: the batch does not come.
      ValueError: the training input ends.
    """
    name = f"the batch of step {step + 1} from the input"
    factor = watchdog.PREPARING if is_first else 1.0
    try:
        with watchdog.waiting(name, factor=factor, interruptible=True):
            taken = take()
    except watchdog.StalledError as error:
        if save is None:
            raise
        save()
        raise watchdog.StalledError(
            f"{error}; step {step} is saved: repeat the command when the input is available"
        ) from error
    if not taken:
        raise ValueError(f"the training input ends before step {step}")
    return taken
