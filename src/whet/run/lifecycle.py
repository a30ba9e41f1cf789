"""A run from start to end: prepare, assemble, train, export."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from whet.checkpoint import directory
from whet.config import Config
from whet.core import launch_env
from whet.core.checksums import write_hashed_json
from whet.core.console import info, open_log, set_quiet, silence_libraries
from whet.core.distributed import Ranks, init_distributed
from whet.core.errors import RunFailedError, first_line
from whet.core.heartbeat import PHASE
from whet.core.run_folder import RunFolder, read_status
from whet.core.signals import raise_on_stop_signals
from whet.core.watchdog import COLLECTIVE_MARGIN_S
from whet.execution.cuda_graphs import release_cuda_graphs
from whet.exporting.spec import ExportMismatchError
from whet.inference.tasks.load_tasks import load_tasks
from whet.model.quantize import require_bitsandbytes
from whet.parallel.fsdp import is_sharded
from whet.run.assemble import assemble
from whet.run.data import RunData, prepare_data
from whet.run.export_run import ExportRequest, export_model
from whet.run.memory_choice import choose_memory_settings
from whet.run.models.model_builder import BackgroundModelLoader, require_parallel_layers, set_deterministic
from whet.run.monitor import monitor_run
from whet.run.multiprocess import HangDetector, process_group, report_failures, require_consistent_ranks, store_digests
from whet.run.plan_summary import describe_run, print_summary
from whet.run.resume import open_run_folder, recorded_data, train_longer, write_run_inputs
from whet.run.step_rows import require_rows
from whet.training.metrics import StartupTimer
from whet.training.run_state import Run
from whet.training.trackers import check_trackers
from whet.training.trainer import train


def run_training(
    config: Config, *, resume: bool, until: int | None = None, save: bool = True,
    measure: Callable[[Run], None] | None = None,
) -> None:  # fmt: skip
    """Prepare the data, assemble the run, train it and export the model.

    `until`: stop after this step, with the schedule of the whole run. `save`: write checkpoints and the export.
    `measure`: called with the assembled run instead of training it, as `whet fit` does.
    """
    startup = StartupTimer()
    startup.end_phase("import_s")
    rank, world_size = launch_env.rank(), launch_env.world_size()
    if rank > 0:
        set_quiet()
    silence_libraries()
    set_deterministic(config)  # before a thread uses the device
    load_tasks(config.eval)
    trackers = check_trackers(config.track) if measure is None else []
    if config.quantize is not None:
        require_bitsandbytes()
    require_parallel_layers(config)
    if not resume:
        require_rows(config, *launch_env.process_layout())  # before data is prepared
    is_finished = resume and read_status(config.folder).get("state") == "finished"
    timeout_s = 60.0 * config.parallel.timeout
    PHASE.enter("preparing data", unbounded=True)
    with (
        raise_on_stop_signals(),
        contextlib.closing(HangDetector(config.folder, rank, world_size, timeout_s)) as hang_detector,
        contextlib.closing(BackgroundModelLoader(config)) as loading,
        open_run_folder(config, resume, first=rank == 0) as folder,
        monitor_run(config, folder is not None and measure is None and not is_finished),
    ):
        if is_finished:
            info(f"{config.folder}: this run is finished; nothing to do. {train_longer(config.folder)}")
            return
        is_new = folder is not None and not folder.holds_run()
        log = config.folder / "logs" / f"rank-{rank}.log"
        if folder is not None:  # the others wait until it exists
            open_log(log)
        if resume and is_new:
            info(f"{config.folder}: there is nothing to resume; the run starts at step {config.train.first_step}")
        data = prepare_data(config, *recorded_data(config.folder), while_waiting=loading.start)
        with data.check() as store_check:
            if folder is not None:
                write_run_inputs(folder, config, data)
            digests = store_digests(data) if world_size > 1 else {}
            PHASE.enter("joining the process group")
            ranks = init_distributed(timeout_s + COLLECTIVE_MARGIN_S, config.launch.share_gpu, config.run.device)
            with process_group(ranks):
                hang_detector.start()
                if folder is None:
                    open_log(log)
                with report_failures(config.folder, rank, world_size) as peers, advise_on_out_of_memory():
                    # rank 0 has written the plan by now
                    peers += require_consistent_ranks(config.folder, digests, config.model.path, ranks)
                    [is_new] = ranks.all_gather([is_new] if ranks.is_main else [])
                    startup.end_phase("prepare_s")
                    with assemble(
                        config, data, store_check, loading, folder, ranks, is_new=is_new, until=until, save=save,
                        startup=startup, trackers=trackers,
                    ) as run:  # fmt: skip
                        if measure is not None:
                            measure(run)
                            return
                        startup.end_phase("load_s")
                        choose_memory_settings(run, config)
                        startup.end_phase("fit_s")
                        if folder is not None:
                            write_hashed_json(folder.path / "plan.json", describe_run(run))
                        print_summary(run)
                        train(run)
                        run.output.write_effect(run.step, run.effect.measure(run.optimizer))
                hang_detector.close()
            if folder is not None:  # the other processes have left: none waits in a collective for the export
                with report_failures(config.folder, rank, world_size):
                    _finish(run, data, folder)


@contextlib.contextmanager
def advise_on_out_of_memory() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunFailedError(
            f"the device has too little memory: {first_line(error)} `whet fit` shows what takes it. Lower "
            "train.micro_rows or data.max_length, set parallel.recompute=full or parallel.offload, train an adapter "
            "instead of every weight, or use a larger device"
        ) from None


def _finish(run: Run, data: RunData, folder: RunFolder) -> None:
    """Export the trained model, unless --until paused the run; the best one if eval.patience ended it."""
    folder.require_present()
    steps, kind = run.plan.last_step, run.config.export.at_end
    ends_early = run.ends_early()
    if run.intervals.last < steps and not ends_early:
        info(f"paused after step {run.intervals.last} of {steps} (--until); --resume continues")
        folder.set_status("stopped", run.intervals.last, steps, exit_code=0)
        return
    if run.saver is not None and kind != "none":
        best = directory.resolve_step(folder.path / "checkpoints", "best") if ends_early else run.step
        _export(run, data, kind, best)
    reason = "eval.patience: ended early" if ends_early else None
    folder.set_status("finished", run.step, steps, exit_code=0, reason=reason)


def _export(run: Run, data: RunData, kind: str, step: int) -> None:
    """Export the checkpoint of a step, after freeing the memory of training."""
    sharded = is_sharded(run.model)
    release_cuda_graphs(run.model)
    run.optimizer.state.clear()
    for tensor in () if sharded else (*run.model.parameters(), *run.model.buffers()):
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    ranks = Ranks(0, 1, torch.device("cpu")) if sharded else run.ranks
    try:
        export_model(run.config, data, ExportRequest(kind), step, ranks, is_final=True)
    except ExportMismatchError as error:
        raise RunFailedError(str(error)) from error
