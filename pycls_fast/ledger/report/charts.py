"""The charts of a ledger. Variants also differ in position, marker and line style, so that charts print in grey."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pycls_fast.ledger.measure.gradients import SMALLEST_SUBNORMAL
from pycls_fast.ledger.report.drawing import (
    BAD,
    BAND,
    GOOD,
    INK,
    LINE,
    PALE,
    SIGNS,
    STROKES,
    UNKNOWN,
    Bar,
    Chart,
    bars,
    legend,
    literal,
    name_rows,
    plain_axes,
)
from pycls_fast.ledger.report.record import Curve, Paired, Record, Timing, VariantRecord
from pycls_fast.ledger.report.statistics import Verdict
from pycls_fast.ledger.report.text import has_imagenet_size, pixels, size_text, state
from pycls_fast.published import IMAGENET_TRAINING_IMAGES

# Smaller differences in a process's peak memory are lost among its libraries.
_LEAST_DIFFERENCE = 0.1
# Points of a curve of differences: the loss of single steps is too noisy to compare.
_BINS = 40


def charts(record: Record) -> list[Chart]:
    """All charts for which the record has numbers."""
    made = (
        _decision(record),
        _throughput(record),
        _differences(record, "difference", "against_reference", "the first variant"),
        # Only if the one before is not the first one for all of them.
        _differences(record, "difference_before", "against_before", "the variant before it")
        if any(variant.before not in (None, record.reference.name) for variant in record.variants)
        else None,
        _front(record),
        _rates(record),
        _ranks(record),
        _epochs(record),
        _memory(record),
        _losses(record),
        _loss_differences(record),
        _rounding(record),
        _gradients(record),
    )
    return [chart for chart in made if chart is not None]


def _decision(record: Record) -> Chart | None:
    """What each variant gains in speed against what it costs in accuracy, in mode=crossed."""
    speeds = {variant.name: timing.speedup for variant, timing in record.timed if timing.speedup}
    effects = record.accuracy.effects if record.accuracy else []
    found = [(effect, speeds[effect.variant]) for effect in effects if effect.variant in speeds]
    if not found:
        return None
    figure, axes = plain_axes(4.2)
    margin = record.settings.margin
    axes.axhspan(-margin, 0, color=BAND, zorder=0, linewidth=0)
    axes.axhline(0, color=LINE, linewidth=1, zorder=1)
    axes.axhline(-margin, color=INK, linewidth=1.2, linestyle="--", zorder=1, label=f"margin, -{margin:g} points")
    axes.axvline(1, color=LINE, linewidth=1, zorder=1)
    for place, (effect, speedup) in enumerate(found):
        costs = effect.word is not None and effect.word.startswith("costs")
        color = BAD if costs else UNKNOWN if effect.word in (None, "undecided") else GOOD
        errors = [[effect.difference - effect.low], [effect.high - effect.difference]]
        axes.errorbar(
            speedup.ratio, effect.difference, yerr=errors, color=color, capsize=3, linestyle="none", linewidth=1.4,
            marker=SIGNS[place % len(SIGNS)], markersize=7,
            label=literal(f"{effect.variant}: {effect.word or 'not at a look'}", 44),
        )  # fmt: skip
    axes.set_xlabel("speed-up", fontsize=9)
    axes.set_ylabel("top-1 gained, points", fontsize=9)
    axes.xaxis.set_major_formatter("{x:.2f}x")
    axes.locator_params(axis="x", nbins=6)
    figure.set_figheight(4.2 + 0.17 * len(found))
    figure.legend(fontsize=7.5, frameon=False, loc="outside lower center", ncols=1)
    return Chart(
        "decision",
        "Speed gained and accuracy lost",
        "Each point is a variant, with the 95% interval of its effect on top-1. Above the dashed line a loss does not "
        "matter; right of 1 it is faster.",
        figure,
    )


def _throughput(record: Record) -> Chart | None:
    """Speed-ups per rank, with intervals."""
    if not record.timed:
        return None
    first, chip = record.reference, _chip(record)
    several = any(variant.ranks > 1 for variant in record.variants)

    def bar(variant: VariantRecord) -> Bar:
        found = variant.timing and variant.timing.speedup
        if not found:
            return Bar(variant, 0.0, "" if variant.timing else state(variant))
        share = first.ranks / variant.ranks
        ends = None if found.low is None or found.high is None or variant is first else (found.low, found.high)
        interval = (ends[0] * share, ends[1] * share) if ends else None
        return Bar(variant, found.ratio * share, f"{found.ratio * share:.2f}x", interval)

    apart = ", ".join(v.name for v, timing in record.timed if timing.speedup and timing.speedup.unpaired)
    return Chart(
        "throughput",
        "Relative throughput" + (f" per {chip}" if several else ""),
        "Rate over the first variant's, paired by round. The thin line is the 95% interval."
        + (f" Rounds from different starts, not paired: {apart}." if apart else ""),
        bars(
            [bar(variant) for variant in record.variants],
            f"images/s{f' per {chip}' if several else ''}, first variant = 1",
            line=1.0,
        ),
    )


def _chip(record: Record) -> str:
    """What a rank computes on."""
    return "process" if record.device == "cpu" else "chip"


def _timed_bars(
    record: Record, value: Callable[[Timing], float], text: Callable[[VariantRecord, Timing], str], label: str
) -> Figure:
    return bars([Bar(variant, value(timing), text(variant, timing)) for variant, timing in record.timed], label)


def _rates(record: Record) -> Chart | None:
    """Images per second of all ranks."""
    if not record.timed:
        return None

    def text(variant: VariantRecord, timing: Timing) -> str:
        rate, ranks = timing.images_per_second, f", {variant.ranks} ranks" if variant.ranks > 1 else ""
        return (f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}") + ranks

    figure = _timed_bars(record, lambda timing: timing.images_per_second, text, "images/s")
    what = "Training steps on a batch in memory, all ranks together; geometric mean of the rounds."
    return Chart("rates", "Images per second", what, figure)


def _epochs(record: Record) -> Chart | None:
    """Time per epoch of ImageNet at the measured rate; None for small images."""
    if not has_imagenet_size(record):
        return None
    most = max(timing.imagenet_epoch_seconds for _, timing in record.timed)
    unit, size = next((u, s) for u, s in (("days", 86400), ("hours", 3600), ("minutes", 60)) if most > s or s == 60)
    figure = _timed_bars(
        record,
        lambda timing: timing.imagenet_epoch_seconds / size,
        lambda _, timing: f"{timing.imagenet_epoch_seconds / size:.3g}",
        unit,
    )
    what = f"{IMAGENET_TRAINING_IMAGES:,} images of {pixels(record)} at the measured rate, if loading is not the limit."
    return Chart("epoch", "Time per ImageNet-1k epoch", what, figure)


def _memory(record: Record) -> Chart | None:
    """Peak memory; None on a CPU if its libraries hide the differences."""
    found = [(variant, timing.memory_peak_bytes) for variant, timing in record.timed if timing.memory_peak_bytes]
    peaks = [peak for _, peak in found]
    on_cpu = record.device == "cpu"
    if not peaks or (on_cpu and max(peaks) - min(peaks) < _LEAST_DIFFERENCE * max(peaks)):
        return None
    where = "of the process, including its libraries," if on_cpu else "of the device"
    figure = bars([Bar(variant, peak / 1e9, size_text(peak)) for variant, peak in found], "GB")
    return Chart("memory", "Peak memory per rank", f"Highest memory {where} during training steps.", figure)


def _ranks(record: Record) -> Chart | None:
    """Images per second per rank against the number of ranks."""
    rates = [
        (variant.name, variant.ranks, timing.images_per_second / variant.ranks) for variant, timing in record.timed
    ]
    counts = sorted({count for _, count, _ in rates})
    if len(counts) < 2:
        return None
    # Variants that differ only in ranks ("DDP x2", "DDP x4") share a line, which begins with the one-rank variant.
    families: dict[str, list[tuple[int, float]]] = {}
    for name, count, rate in rates:
        families.setdefault(name.rpartition(" x")[0] or name, []).append((count, rate))
    single = [(count, rate) for _, count, rate in rates if count == 1][:1]
    figure, axes = plain_axes(3.4)
    for place, (name, points) in enumerate((n, p) for n, p in families.items() if max(p)[0] > 1):
        points = sorted([*(single if points[0][0] > 1 else []), *points], key=lambda point: point[0])
        (line,) = axes.plot(*zip(*points, strict=True), color=INK, label=literal(name), markerfacecolor="white")
        line.set(linestyle=STROKES[place % 4], marker=SIGNS[place % len(SIGNS)])
    axes.axhline(min(rates, key=lambda each: each[1])[2], color=LINE, linewidth=1, zorder=0, label="ideal")
    axes.set_xlabel("ranks", fontsize=9)
    axes.set_ylabel("images/s per rank", fontsize=9)
    axes.set_xticks(counts)
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    axes.legend(fontsize=8, frameon=False)
    return Chart(
        "ranks",
        f"Throughput per {_chip(record)} against the number of ranks",
        "The same global batch for all. The grey line is the rate of the fewest ranks, which ideal scaling keeps."
        + (" Processes on a CPU share its cores." if record.device == "cpu" else ""),
        figure,
    )


def _differences(record: Record, name: str, key: str, other: str) -> Chart | None:
    """Differences in top-1 from another variant, paired by seed."""
    found: list[tuple[VariantRecord, Paired]] = [
        (variant, paired)
        for variant, training in record.trained
        if (paired := getattr(training, key)) and paired.verdict.difference is not None
    ]
    if not found:
        return None
    figure, axes = plain_axes(0.9 + 0.52 * len(found))
    margin = record.settings.margin
    axes.axvspan(-margin, 0, color=BAND, zorder=0, linewidth=0)
    axes.axvline(0, color=LINE, linewidth=1, zorder=1)
    for place, (_, paired) in enumerate(found):
        low, high, difference = paired.verdict.low, paired.verdict.high, paired.verdict.difference
        if low is not None and high is not None:
            axes.plot([low, high], [place, place], color=INK, linewidth=1.6, marker="|", markersize=8)
        axes.plot(difference or 0.0, place, color=INK, marker="D", markersize=5.5, linestyle="none")
        seen: Counter[float] = Counter()
        for pair in paired.images.values():
            # Equal differences are drawn below each other.
            value = round(pair.difference, 6)
            at = place + 0.2 + 0.11 * seen[value]
            axes.plot(value, at, color=INK, marker="o", markersize=4, markerfacecolor="white")
            seen[value] = (seen[value] + 1) % 3
    labels = [f"{literal(variant.name)}\n{_difference_text(paired.verdict)}" for variant, paired in found]
    axes.set_yticks(range(len(found)), labels)
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.set_xlabel(f"top-1 over {other}, points", fontsize=9)
    # Differences of thousandths have long labels.
    axes.locator_params(axis="x", nbins=6)
    what = "Paired by seed: mean and 95% interval; each circle below is a seed. Grey: a loss within the accepted "
    return Chart(name, f"Difference in top-1 from {other}", f"{what}{margin:g} points.", figure)


def _difference_text(verdict: Verdict) -> str:
    if verdict.finding == "identical":
        return "identical"
    between = f" ({verdict.low:+.2f} to {verdict.high:+.2f})" if verdict.low is not None else ""
    return f"{verdict.difference:+.2f}{between}"


def _front(record: Record) -> Chart | None:
    """Accuracy against throughput, with the variants that no other one beats in both."""
    found = [(v, v.timing.images_per_second, v.training.top1.mean) for v in record.variants
             if v.timing and v.training and v.training.top1]  # fmt: skip
    if len(found) < 2:
        return None
    figure, axes = plain_axes(3.9)
    best = sorted(
        (rate, score)
        for _, rate, score in found
        if not any((r > rate and s >= score) or (r >= rate and s > score) for _, r, s in found)
    )
    axes.step(*zip(*best, strict=True), where="pre", color=LINE, linewidth=1, linestyle="--", zorder=0)
    # With more variants than markers, they are numbered.
    many = len(found) > len(SIGNS)
    for place, (variant, rate, score) in enumerate(found):
        fill = PALE if variant.before is None else INK if (rate, score) in best else "white"
        axes.errorbar(
            rate, score, xerr=_rate_errors(variant), yerr=_score_errors(variant), color=INK,
            ecolor=PALE if many else INK, capsize=2, elinewidth=0.8, linestyle="none",
            marker=f"${place}$" if many else SIGNS[place], markersize=9 if many else 7,
            markeredgewidth=0.3 if many else 1, markerfacecolor=INK if many else fill, label=literal(variant.name),
        )  # fmt: skip
    # No interval makes a score above 100 possible.
    axes.set_ylim(top=min(axes.get_ylim()[1], 100 + 0.02 * (100 - axes.get_ylim()[0])))
    axes.set_xlabel("images/s", fontsize=9)
    axes.set_ylabel("top-1, %", fontsize=9)
    legend(figure, axes, len(found), loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return Chart(
        "accuracy",
        "Accuracy against throughput",
        f"Mean over the seeds; {'on' if many else 'filled: on'} the dashed front, where nothing is both faster and "
        "better. Bars: 95% intervals of the speed-up and of the paired difference in top-1 from the first variant.",
        figure,
    )


def _rate_errors(variant: VariantRecord) -> list[list[float]] | None:
    """Distances of the rate from the ends of its speed-up's interval."""
    timing = variant.timing
    found = timing and timing.speedup
    if variant.before is None or not timing or not found or found.low is None or found.high is None:
        return None
    rate = timing.images_per_second
    return [[rate * (1 - found.low / found.ratio)], [rate * (found.high / found.ratio - 1)]]


def _score_errors(variant: VariantRecord) -> list[list[float]] | None:
    """Distances of the score from the ends of the paired difference's interval."""
    paired = variant.training and variant.training.against_reference
    if not paired or paired.verdict.low is None or paired.verdict.high is None or paired.verdict.difference is None:
        return None
    difference = paired.verdict.difference
    return [[difference - paired.verdict.low], [paired.verdict.high - difference]]


def _losses(record: Record) -> Chart | None:
    """The loss curves, averaged over the seeds."""
    found = [(variant, [run.curve for run in training.runs]) for variant, training in record.trained if training.runs]
    if not found:
        return None
    figure, axes = plain_axes(3.6)
    for place, (variant, curves) in enumerate(found):
        _line(axes, place, len(found), variant, *_mean_curve(curves))
    _finish(figure, axes, len(found), "training loss, nats")
    return Chart("loss", "Loss curves", "Mean over the seeds; the thick line is the first variant.", figure)


def _loss_differences(record: Record) -> Chart | None:
    """The differences of the loss curves from the first variant's, paired by seed and averaged."""
    first, *others = record.variants
    known = _by_seed(first)
    pairs = [
        (variant, [_difference(known[seed], each) for seed, each in _by_seed(variant).items() if seed in known])
        for variant in others
    ]
    pairs = [(variant, kept) for variant, found in pairs if (kept := [pair for pair in found if pair.epoch])]
    if not pairs:
        return None
    figure, axes = plain_axes(3.6)
    band = _band(list(known.values()))
    if band is not None:
        epochs, spread = band
        axes.fill_between(epochs, -spread, spread, color=BAND, linewidth=0, zorder=0)
    axes.axhline(0, color=PALE, linewidth=4, zorder=1)
    for place, (variant, found) in enumerate(pairs, 1):
        _line(axes, place, len(pairs) + 1, variant, *_binned(*_mean_curve(found)))
    _finish(figure, axes, len(pairs), "training loss over the first variant's, nats")
    grey = "" if band is None else " Grey: standard deviation of the first variant's loss over its seeds."
    return Chart(
        "loss_difference",
        "Loss curves as differences from the first variant",
        f"Pairs of runs with the same seed, averaged over the seeds and over a {_BINS}th of the training.{grey}",
        figure,
    )


def _line(axes: Axes, place: int, count: int, variant: VariantRecord, epochs: np.ndarray, losses: np.ndarray) -> None:
    first, points = variant.before is None, len(epochs)
    axes.plot(
        epochs, losses, label=literal(variant.name), color=PALE if first else str(0.05 + 0.6 * place / count),
        linestyle=STROKES[place % 4], linewidth=4 if first else 1.3, marker=SIGNS[place % len(SIGNS)], markersize=4,
        markevery=(place * points // (8 * count), max(points // 8, 1)),
    )  # fmt: skip


def _finish(figure: Figure, axes: Axes, entries: int, label: str) -> None:
    axes.set_xlabel("epoch", fontsize=9)
    axes.set_ylabel(label, fontsize=9)
    legend(figure, axes, entries)


def _by_seed(variant: VariantRecord) -> dict[int, Curve]:
    runs = variant.training.runs if variant.training else []
    return {run.seed: run.curve for run in runs if run.curve.epoch}


def _difference(reference: Curve, other: Curve) -> Curve:
    """The loss of a curve minus the reference's, at the reference's epochs that both cover."""
    epochs = _shared([reference, other])
    first, second = (np.interp(epochs, each.epoch, each.loss) for each in (reference, other))
    return Curve(epoch=epochs.tolist(), loss=(second - first).tolist())


def _band(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray] | None:
    """Standard deviation of the loss over seeds, with its epochs; None with fewer than two seeds."""
    epochs = _shared(curves)
    if len(curves) < 2 or not len(epochs):
        return None
    losses = [_binned(epochs, np.interp(epochs, each.epoch, each.loss)) for each in curves]
    return losses[0][0], np.std([loss for _, loss in losses], axis=0, ddof=1)


def _binned(epochs: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means over equally many neighbouring points, at most `_BINS` of them."""
    parts = np.array_split(np.stack([epochs, losses]), min(_BINS, len(epochs)), axis=1)
    means = np.array([part.mean(axis=1) for part in parts])
    return means[:, 0], means[:, 1]


def _mean_curve(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """The mean loss over the runs at the epochs that all of them cover; empty if they share none.

    Runs of one variant may have different epochs and numbers of points, as each curve was thinned by itself.
    """
    known = [each for each in curves if each.epoch]
    if not known:
        return np.empty(0), np.empty(0)
    epochs = _shared(known)
    return epochs, np.mean([np.interp(epochs, each.epoch, each.loss) for each in known], axis=0)


def _shared(curves: Sequence[Curve]) -> np.ndarray:
    """The first curve's epochs that all of them cover."""
    start, end = max(each.epoch[0] for each in curves), min(each.epoch[-1] for each in curves)
    return np.array([epoch for epoch in curves[0].epoch if start <= epoch <= end])


def _rounding(record: Record) -> Chart | None:
    """Errors against float64 before and after some training steps."""
    found = [(variant, variant.numerics) for variant in record.variants if variant.numerics]
    if not found:
        return None
    figure, axes = plain_axes(0.9 + 0.36 * len(found))
    shown: dict[tuple[str, str], str] = {}
    for place, (_, errors) in enumerate(found):
        for error, sign, when in zip(errors, "o^", ("before training", "after training steps"), strict=False):
            for value, fill, what in (
                (error.gradient_error, INK, "gradients"),
                (error.logit_error, "white", "logits"),
            ):
                if isinstance(value, float) and value > 0:
                    shown[sign, fill] = f"{what}, {when}"
                    axes.plot(
                        value, place, marker=sign, color=INK, markerfacecolor=fill, markersize=7, linestyle="none"
                    )
    for (sign, fill), label in sorted(shown.items(), key=lambda each: each[1].endswith("steps")):
        axes.plot([], [], marker=sign, color=INK, markerfacecolor=fill, linestyle="none", label=label)
    axes.set_xscale("log")
    name_rows(axes, [variant for variant, _ in found])
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("relative error against float64", fontsize=9)
    if shown:
        figure.legend(fontsize=7.5, frameon=False, loc="outside upper center", ncols=2)
    what = "Norm of the difference from float64 with the same weights, over float64's norm."
    return Chart("errors", "Rounding", what, figure)


def _gradients(record: Record) -> Chart | None:
    """Histogram of the first variant's gradients."""
    if record.gradients is None:
        return None
    total = record.gradients.total
    exponents = {int(key): count for key, count in total["exponents"].items()}
    some = max(sum(exponents.values()), 1)
    figure, axes = plain_axes(3.2)
    used = (*exponents, SMALLEST_SUBNORMAL)
    places = range(min(used) - 1, max(used) + 2)
    for is_lost, color, hatch, label in ((True, "white", "////", "zero in float16"), (False, INK, None, "kept")):
        # Values above half the smallest number round up to it.
        chosen = [place for place in places if (place < SMALLEST_SUBNORMAL - 1) == is_lost]
        if chosen:
            heights = [100 * exponents.get(place, 0) / some for place in chosen]
            at = [place + 0.5 for place in chosen]
            axes.bar(at, heights, width=0.9, color=color, hatch=hatch, edgecolor=INK, label=label)
    axes.set_xlabel("log₂ |gradient|", fontsize=9)
    axes.set_ylabel("% of gradients", fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    return Chart(
        "gradients",
        "Gradients of the first variant",
        f"Zero in float16: {100 * total['below_subnormal']:.2g}%, with the loss times {record.gradients.loss_scale:g}: "
        f"{100 * total['below_subnormal_scaled']:.2g}%. Updates that float16 weights lose without float32 masters: "
        f"{100 * total['updates_lost_float16']:.1f}%, bfloat16 weights: {100 * total['updates_lost_bfloat16']:.1f}%.",
        figure,
    )
