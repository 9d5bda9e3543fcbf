"""A plan as `dps plan` shows it: a figure a row, and what it is made of."""

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from dps_dist.launch.plan import Plan, capacity, exchange_room, store_bytes
from dps_dist.targets import migrate

Row = tuple[str, str, str]
MISSING = "–"


def table(plan: Plan) -> Table:
    shown = Table(box=None, header_style="bold")
    shown.add_column("what", no_wrap=True)
    shown.add_column("figure", justify="right", no_wrap=True)
    shown.add_column("of what", style="dim")
    for title, rows in sections(plan):
        shown.add_row(Text(title, "bold"))
        for row in rows:
            shown.add_row("  " + row[0], *map(Text, row[1:]))  # a path may look like markup
    return shown


def sections(plan: Plan) -> Iterator[tuple[str, list[Row]]]:
    yield "cluster", list(_cluster(plan))
    yield "data", list(_data(plan))
    if plan.row:
        yield "targets", list(_targets(plan))
    yield "network, an epoch", list(_network(plan))
    yield "storage", list(_storage(plan))
    yield "host memory of a node", list(_memory(plan))
    yield "time", list(_time(plan))


def notes(plan: Plan) -> Iterator[str]:
    """What to know or to give, a sentence each."""
    W, batch = plan.cluster.workers, plan.config.data.batch_size
    if batch % W:
        yield (
            f"data.batch_size, {batch}, is no multiple of {W} workers: train with a range, "
            f"--workers 1:{W}, or another batch"
        )
    if plan.cluster.bandwidth is None and plan.cluster.nodes > 1:
        yield "give --bandwidth, the Gb/s of a node's link, for seconds on the network"
    link, computing = plan.over_link_s(plan.gradients), plan.computing_s
    if link is not None and computing is not None and link > computing:
        yield (
            f"an epoch's gradients take {duration(link)} on a node's link and its computing "
            f"{duration(computing)}: a larger data.batch_size has fewer steps"
        )
    if plan.cluster.images_per_s is None:
        yield (
            "give --images-per-s, what one GPU trains (a run's log says it), for the time: "
            f"an epoch takes {plan.visited:,} / ({W} × images/s) and what the network adds"
        )


def _cluster(plan: Plan) -> Iterator[Row]:
    cluster, config = plan.cluster, plan.config
    cpus = cluster.gpus_per_node * config.launch.cpus_per_worker
    yield "workers", f"{cluster.workers}", f"{cluster.nodes} × {cluster.gpus_per_node}, a GPU each"
    yield "CPUs a node", f"{cpus:g}", f"{config.launch.cpus_per_worker:g} a worker"
    share = -(-config.data.batch_size // cluster.workers)
    yield "images a GPU and step", f"{share:,}", f"{config.data.batch_size:,} over all"


def _data(plan: Plan) -> Iterator[Row]:
    data = plan.data
    yield "samples", f"{data.samples:,}", data.known
    yield "classes", f"{data.classes:,}", ""
    yield ".beton files", _range(data.beton), "all splits; shared, or on each node"


def _targets(plan: Plan) -> Iterator[Row]:
    N, K, W = plan.data.samples, plan.row, plan.cluster.workers
    yield "over the cluster", size(store_bytes(N, K)), f"2NK + 2N, K={K:,}"
    slack = migrate.slack_rows(W)
    yield "a GPU", size(plan.held), f"{capacity(N, W):,} rows, {slack} of them slack; 6N"
    if plan.exchanges:
        yield "… while rows move", f"+ {size(exchange_room(N, K, W))}", "at most"
    yield "free on a GPU", size(plan.free_gpu_memory), "at least, else they live on the host"


def _network(plan: Plan) -> Iterator[Row]:
    if plan.row:
        why = "rows go to who visits them next" if plan.exchanges else "no row travels"
        yield "targets, from a GPU", size(plan.moved), why
    if plan.cluster.nodes == 1:
        yield "from a node", size(0), "there is one node"
        return
    if plan.row:
        seconds = duration(plan.over_link_s(plan.leaving))
        yield "targets, from a node", size(plan.leaving), f"{seconds} on its link"
    seconds = duration(plan.over_link_s(plan.gradients))
    about = f"{seconds} on its link; {plan.steps:,} steps"
    yield "gradients, from a node", size(plan.gradients), about


def _storage(plan: Plan) -> Iterator[Row]:
    keep = plan.config.train.checkpoint
    best = ", the best" if keep.keep_best else ""
    parts = f"model and optimizer {size(plan.state)}, targets {size(plan.saved_targets)}"
    yield "a checkpoint", size(plan.checkpoint), parts
    yield "checkpoints", f"{plan.kept}", f"the last {keep.keep_last}{best}, one being written"
    yield "a run, at most", size(plan.storage), "these, and the final targets"


def _memory(plan: Plan) -> Iterator[Row]:
    G = plan.cluster.gpus_per_node
    yield "copies, batches", size(plan.host_memory), "beside the processes: what is being saved, …"
    if plan.row:
        yield "targets", size(G * plan.held), "only where they live on the host"
    yield "page cache", _range(plan.data.beton), "worth having: the files are mapped"


def _time(plan: Plan) -> Iterator[Row]:
    rate, workers = plan.cluster.images_per_s, plan.cluster.workers
    speed = MISSING if rate is None else f"{rate * workers:,.0f} images/s"
    yield "training", speed, "--images-per-s × GPUs"
    yield "an epoch", duration(plan.epoch_s), "training, exchange, evaluation"
    yield "the run", duration(plan.run_s), f"{plan.config.train.epochs} epochs"


def _range(both: tuple[float, float]) -> str:
    least, most = map(size, both)
    return least if least == most else f"{least} to {most}"


def size(count: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:,.3g} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return MISSING
    if seconds < 60:
        return f"{seconds:.2g} s"
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"
