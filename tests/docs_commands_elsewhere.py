"""Commands of the documents that tests/docs_test.py does not run, and the tests that cover them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TestedBy:
    """A command that cannot run here (it needs a network, for example); another test covers it."""

    __test__ = False

    test: str  # file::function


TESTED_ELSEWHERE: list[tuple[str, TestedBy]] = [
    (r"python3.11 -m venv \.venv", TestedBy("tests/make_test.py::test_install_makes_a_venv")),
    (r"\. \.venv/bin/activate", TestedBy("tests/make_test.py::test_install_makes_a_venv")),
    (
        r"pip install tensorflow-cpu",
        TestedBy("tests/packaging_test.py::test_required_is_the_tensorflow_that_is_installed"),
    ),
    (
        r"pip install -e '\.\[test\]'",
        TestedBy("tests/packaging_test.py::test_editable_installation_imports_the_source"),
    ),
    (
        r"(apt-get download|dpkg-deb -x) .*",
        TestedBy("tests/tasks/image/sources_test.py::test_missing_fashion_mnist_names_its_package"),
    ),
    (
        r"tekso-trainer .*image\.fashion_mnist.*",
        TestedBy(
            "tests/params/image/fashion_mnist_test.py"
            "::test_the_files_of_the_package_are_trained_on_and_scored"
        ),
    ),
    (
        r"pip install ale-py|tekso-trainer .*image\.pong.*",
        TestedBy("tests/tasks/detection/sources_test.py::test_without_ale_py_pong_names_it"),
    ),
    (
        r"pip download .*deepforest.*|unzip deepforest.*|tekso-trainer .*image\.trees.*",
        TestedBy(
            "tests/tasks/detection/sources_test.py::test_what_is_wrong_with_a_voc_file_is_said"
        ),
    ),
    (
        r"tekso-(trainer|decode) .*runs/boxes.*",
        TestedBy(
            "tests/params/image/boxes_test.py"
            "::test_files_in_the_format_of_coco_are_trained_on_scored_and_searched"
        ),
    ),
    (
        r"npm pack emoji-datasource.*|tar xzf emoji-datasource.*",
        TestedBy(
            "tests/tasks/captioning/sources_test.py"
            "::test_without_the_package_of_emoji_the_error_says_how_to_get_it"
        ),
    ),
    (
        r"tekso-trainer .*(image\.emoji\.Caption|runs/emoji ).*",
        TestedBy("tests/params/image/emoji_test.py::test_emoji_are_captioned_and_scored"),
    ),
    (
        r"tekso-trainer .*(image\.emoji\.DualEncoder|runs/names ).*",
        TestedBy("tests/params/image/emoji_test.py::test_emoji_are_found_by_their_names"),
    ),
    (
        r"tekso-trainer .*image\.glyphs.*",
        TestedBy("tests/tasks/image/glyphs_test.py::test_clones_and_relatives_are_one_family"),
    ),
    (
        r"tekso-trainer .*(image\.unet\.(Shapes|Volumes)|runs/volumes ).*",
        TestedBy(
            "tests/params/image/unet_test.py::test_volumes_are_trained_on_scored_and_segmented"
        ),
    ),
    (
        r"tekso-trainer .*image\.unet.*",
        TestedBy(
            "tests/params/image/unet_test.py::test_folders_are_trained_on_scored_and_segmented"
        ),
    ),
    (
        r"pip install (-e '\.\[images,speech\]'|'tekso\[images\]')",
        TestedBy("tests/packaging_test.py::test_wheel_has_the_extras_of_the_readme"),
    ),
    (
        r"pip install scikit-learn",
        TestedBy("tests/first_task_test.py::test_scikit_learn_is_needed_by_the_page_alone"),
    ),
    (
        r"tekso-trainer --model=\S+ --logdir=\S+ --cluster=\S+ --process=.*",
        TestedBy(
            "tests/framework/execution/data_parallel_processes_test.py"
            "::test_lost_process_is_named_and_the_same_command_resumes"
        ),
    ),
    (
        r"tekso-trainer .*--supervise.*",
        TestedBy(
            "tests/framework/execution/data_parallel_processes_test.py"
            "::test_supervisor_restarts_a_run_that_is_killed_again_and_again"
        ),
    ),
    (
        r"tekso-trainer --import=my_digits .*--logdir=runs/(replicas|sharded|stages) ?.*",
        TestedBy(
            "tests/first_task_test.py::test_every_execution_gives_the_same_losses_and_accuracy"
        ),
    ),
    (  # builds every model
        r"tekso-trainer --list='lm\.\*'",
        TestedBy(
            "tests/tools/trainer_listing_test.py"
            "::test_every_registered_model_of_this_repository_is_counted_or_says_why"
        ),
    ),
    (  # docs/first_task.md has a command that exports
        r"tekso-trainer --mode=export .*--litert=.*",
        TestedBy("tests/tools/export_mode_test.py::test_litert_generates_the_same_ids"),
    ),
    (
        r"tekso-trainer .*--process=.*",
        TestedBy(
            "tests/framework/execution/mesh/processes_test.py"
            "::test_lost_process_is_named_and_the_same_command_continues"
        ),
    ),
    (
        r"tekso-trainer .*execution\.updates.*",
        TestedBy(
            "tests/framework/execution/parameter_servers_test.py"
            "::test_workers_are_lost_and_one_comes_back_and_a_lost_server_ends_the_run"
        ),
    ),
    (
        r"tekso-(worker --address|trainer .*execution\.workers)=.*",
        TestedBy(
            "tests/framework/execution/pipeline/remote_test.py"
            "::test_two_workers_train_as_one_process_and_a_lost_one_is_named"
        ),
    ),
    (
        r"tekso-trainer --model=lm\.python_source\.Tiny(Mesh|Spmd)Pipeline .*",
        TestedBy("tests/shrunk_runs_test.py::test_small_experiments_go_through_all_modes"),
    ),
    (
        r"python tests/chaos/kill_runs\.py .*",
        TestedBy(
            "tests/chaos/killer_test.py"
            "::test_a_run_that_is_killed_and_damaged_is_the_same_to_the_last_bit"
        ),
    ),
    (
        r"python tests/compare_experiments\.py .*",
        TestedBy("tests/compare_experiments_test.py::test_it_selects_what_has_no_result"),
    ),
    (
        r"python tests/fuzz_executions\.py .*",
        TestedBy("tests/fuzz_executions_test.py::test_the_program_repeats_a_case"),
    ),
    (
        r"srun .*tekso-trainer .*",
        TestedBy(
            "tests/framework/cluster_test.py::test_slurm_gives_processes_of_a_node_successive_ports"
        ),
    ),
    (
        r"tekso-(ckpt average|trainer --mode=eval) .*averaged",
        TestedBy("tests/tools/ckpt_test.py::test_an_average_is_evaluated_decoded_and_trained_on"),
    ),
    (
        r"tekso-(trainer|decode) .*--logdir=runs/pair.*",
        TestedBy(
            "tests/params/multi/commands_test.py::test_a_trigger_classifies_lines_and_is_exported"
        ),
    ),
    (
        r"tekso-trainer .*runs/(shared|teacher|student).*|tekso-decode .*--task=.*",
        TestedBy(
            "tests/params/multi/commands_test.py"
            "::test_two_tasks_are_trained_evaluated_decoded_and_one_is_distilled"
        ),
    ),
    (
        r"tekso-trainer .*--logdir=runs/python( .*)?",
        TestedBy(
            "tests/tools/trainer_test.py"
            "::test_the_default_experiment_trains_evaluates_samples_and_continues"
        ),
    ),
    (
        r"tekso-(decode .*--language|trainer .*--mode=decode .*task\.decode_language)=.*",
        TestedBy("tests/tools/decode_test.py::test_a_model_of_several_languages_takes_one_of_them"),
    ),
    (
        r"tekso-decode .*--pictures=found_masks",
        TestedBy(
            "tests/tools/decode_images_test.py"
            "::test_masks_are_palette_files_of_the_size_of_the_image_that_the_source_of_masks_reads"
        ),
    ),
    (
        r"tekso-trainer .*--logdir=runs/new_head .*",
        TestedBy(
            "tests/framework/run/initial_weights_test.py"
            "::test_several_checkpoints_and_weights_that_keep_their_initial_values"
        ),
    ),
    (
        r"tekso-decode .*--input=pictures .*",
        TestedBy("tests/tools/decode_images_test.py::test_every_image_of_a_folder_gets_a_line"),
    ),
    (
        r"tekso-decode .*",
        TestedBy(
            "tests/tools/decode_test.py::test_every_line_has_its_translation_and_empty_lines_stay"
        ),
    ),
    (  # the largest models, which take half a minute each
        r"tekso-trainer --mode=inspect_sharding --model=lm\.one_billion_words\.MeshDff262144",
        TestedBy(
            "tests/tools/trainer_listing_test.py"
            "::test_inspect_sharding_of_4_9_billion_weights_on_512_devices"
        ),
    ),
    (  # searches some thousand layouts
        r"tekso-trainer --mode=inspect_sharding --auto --model=lm\.one_billion_words\.Dff262144 .*",
        TestedBy(
            "tests/framework/planning/layout_search_test.py"
            "::test_on_the_model_of_the_paper_its_layout_or_a_better_one_is_the_best"
        ),
    ),
    (
        r"tekso-trainer --mode=inspect_pipeline --model=lm\.gpipe\.Layers1663",
        TestedBy(
            "tests/framework/run/pipeline_plan_test.py"
            "::test_deepest_model_on_128_devices_is_traced_piece_by_piece_of_a_kind_and_needs_no_"
            "devices"
        ),
    ),
    (
        r"tekso-(ckpt convert .*--layout=gpt2|trainer --mode=eval --logdir=runs/gpt2) .*",
        TestedBy("tests/tools/weight_commands_test.py::test_an_imported_gpt2_is_evaluated"),
    ),
    (
        r"(arecord .*)?tekso-decode --logdir=runs/prompts .*",
        TestedBy(
            "tests/tools/decode_speech_test.py"
            "::test_files_and_samples_on_standard_input_have_the_same_transcript"
        ),
    ),
    (
        r"tekso-trainer .*runs/texts.*",
        TestedBy(
            "tests/params/asr/prompts_test.py::test_prompts_are_recognised_with_a_language_model"
        ),
    ),
    (
        r"tekso-trainer .*--logdir=runs/own .*TranscriptFiles.*",
        TestedBy(
            "tests/tasks/asr/input_test.py"
            "::test_utterances_of_a_table_are_named_by_their_audio_files"
        ),
    ),
    (
        r"pip install 'tekso\[speech\]'|apt-get download asterisk.*|for deb in asterisk.*"
        r"|export TEKSO_ASTERISK=.*|tekso-trainer .*runs/prompts.*",
        TestedBy(
            "tests/params/asr/prompts_test.py::test_prompts_are_trained_on_scored_and_transcribed"
        ),
    ),
    (
        r"tekso-ckpt diff .*",
        TestedBy("tests/tools/reading_commands_test.py::test_diff_names_what_differs"),
    ),
    (
        r"tekso-compare .*",
        TestedBy(
            "tests/tools/compare_test.py"
            "::test_the_page_is_one_file_without_scripts_and_the_csv_has_all_points"
        ),
    ),
    (
        r"tekso-results .*",
        TestedBy("tests/tools/results_test.py::test_a_result_has_what_the_trainer_wrote"),
    ),
    (
        r"(taskset .*)?make benchmarks.*",
        TestedBy("tests/make_test.py::test_benchmarks_passes_its_arguments_on"),
    ),
    (
        r"python -m benchmarks\.publish .*",
        TestedBy(
            "tests/benchmarks/publish_test.py"
            "::test_a_result_is_stored_with_a_line_for_each_process_and_written_into_both_documents"
        ),
    ),
    (
        r"make docs",
        TestedBy(
            "tests/site_test.py::test_the_site_builds_without_warnings_and_has_a_search_index"
        ),
    ),
    (  # needs a browser
        r"make pictures ARGS=--tensorboard",
        TestedBy(
            "tests/tools/tensorboard_pages_test.py"
            "::test_the_browser_gets_the_pages_of_a_tensorboard_with_the_run"
        ),
    ),
    (
        r"make pictures.*",
        TestedBy(
            "tests/tools/pictures_test.py::test_points_and_seconds_are_those_that_the_run_wrote"
        ),
    ),
    (r"make catalogue", TestedBy("tests/tools/catalogue_test.py::test_the_page_is_up_to_date")),
    (
        r"tekso-sweep .*",
        TestedBy(
            "tests/tools/sweep_test.py"
            "::test_a_sweep_that_is_killed_resumes_its_trial_and_runs_no_other_again"
        ),
    ),
    (
        r"tekso-trainer .*--profile_steps=.*",
        TestedBy("tests/tools/trainer_test.py::test_a_profile_and_figures_of_weights_are_written"),
    ),
    (
        r"python -m tekso\.tools\.plan_accuracy",
        TestedBy("tests/tools/plan_accuracy_test.py::test_plan_and_measurement_are_side_by_side"),
    ),
    (
        r"python -m tekso\.tools\.plan_accuracy 'lm\..*",
        TestedBy(
            "tests/tools/plan_accuracy_test.py::test_words_of_an_argument_reach_both_processes"
        ),
    ),
    (
        r"python -m tekso\.tools\.plan_accuracy several_devices",
        TestedBy(
            "tests/tools/plan_accuracy_test.py::"
            "test_steps_on_several_devices_are_planned_and_measured_with_the_same_devices"
        ),
    ),
    (
        r"python -m tekso\.tools\.plan_accuracy pipelines",
        TestedBy("tests/tools/plan_accuracy_test.py::test_pipelines_are_planned_and_measured"),
    ),
    (
        r"python -m tekso\.tools\.plan_accuracy stages_on_meshes",
        TestedBy(
            "tests/tools/plan_accuracy_test.py::"
            "test_stages_on_meshes_are_compared_without_memory_of_the_plan"
        ),
    ),
    (
        r"python -m tekso\.tools\.pipeline_memory",
        TestedBy(
            "tests/tools/pipeline_memory_test.py::"
            "test_memory_of_all_stages_is_beside_the_measurement_for_every_k_and_m"
        ),
    ),
    (
        r"python -m tekso\.tools\.gpipe_tables.*",
        TestedBy("tests/tools/gpipe_tables_test.py::test_tables_have_the_published_figures_beside"),
    ),
    (
        r"make lint",
        TestedBy(
            "tests/make_test.py::test_test_all_runs_the_quick_tests_then_lint_then_the_slow_tests"
        ),
    ),
]
"""Regular expressions for complete commands; the first match is used."""
