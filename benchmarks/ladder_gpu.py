"""The training step on a GPU: from the reference through every switch to the fastest, beside timm's.

    python benchmarks/ladder_gpu.py
    python benchmarks/ladder_gpu.py --models vit_h16 --budget 1500
    python benchmarks/ladder_gpu.py --page-only

Each rung is a separate process (`tools/time_net.py mode=model`, `benchmarks/timm_step.py`, timm's own `benchmark.py`
with `--timm-source`), so that a failure does not affect the others; a rung that runs out of memory is tried with half
the batch, down to an eighth. Finished rungs are kept in docs/results/gpu_ladder/ and are not run again: the command
resumes where it was stopped (`--again` repeats them). Writes docs/results/gpu_ladder.md, in which rungs without a
record are "not run".
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycls_fast.speed import CATALOGUE, SwitchName
from pycls_fast.speed.cards.images import IMAGES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results" / "gpu_ladder.md"
# Dense bf16 peak of an H100 or H200 SXM (NVIDIA's data sheet) in FLOP/s, the denominator of MFU.
PEAK = 989.4e12
HALVINGS = 3
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Subject:
    """A model: its experiment, batch size, name and arguments in timm, and the target in images/s."""

    config: str
    batch: int
    timm: str
    patch_size: int | None = None
    aim: str = ""

    @property
    def is_vit(self) -> bool:
        return self.config.startswith("vit")


SUBJECTS: Mapping[str, Subject] = {
    "vit_h16": Subject(
        "vit_h16",
        256,
        "vit_huge_patch14_224",
        16,
        "809 images/s, 618 TFLOP/s, MFU 62.5%, 78% of a product at 790 TFLOP/s",
    ),
    "vit_l16": Subject("vit_l16", 384, "vit_large_patch16_224"),
    "vit_b16": Subject("vit_b16", 512, "vit_base_patch16_224"),
    "resnet50": Subject("resnet50", 1024, "resnet50"),
}

# Only the network and its update, as in timm's step.
PLAIN = (
    "data=synthetic", "augment=none", "model.drop_path=0", "model.num_classes=1000", "loss.label_smoothing=0",
    "schedule=constant", "schedule.warmup_epochs=0", "schedule.final_factor=0", "optim.ema_decay=null",
    "optim.clip_norm=null", "optim.accumulation_steps=1",
)  # fmt: skip
# The ladder: each line includes the settings of those above it. Later values of a key win.
VIT_LADDER = (
    "speed=reference precision=fp32",
    "precision=tf32",
    "precision=amp_bf16",
    "speed.attention=sdpa",
    "speed.metrics=interval",
    "speed.optimizer=foreach",
    "speed.optimizer=fused",
    "speed.memory_format=channels_last",
    "speed.compile=blocks",
    "speed.cross_entropy=fused",
    "precision=bf16_params",
    "speed.qkv=fused",
    "speed.attention=sdpa_cudnn",
    "speed.compile_mode=max-autotune-no-cudagraphs",
    "speed.cuda_graphs=on",
)
RESNET_LADDER = tuple(rung for rung in VIT_LADDER if "attention" not in rung and "qkv" not in rung)
# Complete settings, independent of the ladder.
PRESETS = (
    "speed=fast precision=amp_bf16",
    "speed=fast precision=bf16_params",
    "speed=meta2022",
    "speed=fast precision=fp8 speed.compile=blocks",
    "speed=fast precision=fp8 precision.fp8_recipe=rowwise speed.compile=blocks",
)
# Each switch is changed on top of this, one at a time.
BASE = "speed=fast precision=amp_bf16"
# These belong to the loader, not to the step: see tools/time_net.py mode=both.
OF_THE_LOADER = tuple(switch.name for switch in IMAGES)
# Settings without which a switch has no effect.
WITH = {
    SwitchName.DROP_PATH_COMPUTE: "model.drop_path=0.5",
    SwitchName.EMA: "optim.ema_decay=0.9999",
    SwitchName.CLIP: "optim.clip_norm=1.0",
    SwitchName.COMPILE_MODE: "speed.compile=blocks",
    SwitchName.GELU: "speed.compile=blocks",
}


@dataclass(frozen=True)
class Rung:
    """One measurement. `settings` are overrides for ours, or arguments of the peer's script."""

    subject: Subject
    table: str
    name: str
    settings: tuple[str, ...]
    peer: str = ""

    def file(self, folder: Path) -> Path:
        # Hydra does not accept "=" in a value, and time_net.py is given this path.
        slug = re.sub(r"[^a-z0-9.]+", "_", f"{self.table}_{self.name}".lower()).strip("_")
        return folder / self.subject.config / f"{slug}.json"


def rungs(subject: Subject) -> Iterator[Rung]:
    """Everything to measure of a model, the ladder first."""
    held: list[str] = []
    for added in VIT_LADDER if subject.is_vit else RESNET_LADDER:
        held += added.split()
        yield Rung(subject, "ladder", added, tuple(held))
    for preset in PRESETS if subject.is_vit else PRESETS[:2]:
        yield Rung(subject, "preset", preset, tuple(preset.split()))
    for name, arguments in peers(subject):
        yield Rung(subject, "timm", name, arguments, peer="timm_step")
    for mode in ("default", "max-autotune-no-cudagraphs"):
        for kernel in ("default", "cudnn") if subject.is_vit else ("default",):
            attention = f", {kernel} attention" if subject.is_vit else ""
            name = f"timm's benchmark.py, autocast, compiled ({mode}){attention}"
            yield Rung(subject, "timm", name, (mode, kernel), peer="benchmark")
    for switch in CATALOGUE:
        usable = [value for value in switch.values if switch.requires.get(value) != "cpu"]
        applies = ("vit" if subject.is_vit else "resnet") in switch.applies_to
        if switch.name in OF_THE_LOADER or not applies or len(usable) == 1:
            continue
        for value in usable:
            settings = [*BASE.split(), *WITH.get(switch.name, "").split(), f"speed.{switch.name}={value}"]
            yield Rung(subject, "alone", f"{switch.name}={value}", tuple(settings))


def peers(subject: Subject) -> Iterator[tuple[str, tuple[str, ...]]]:
    """timm's model in a plain loop: eager, compiled, both with cuDNN's attention; bfloat16 weights beside them."""
    own = ("--optimizer", "adamw") if subject.is_vit else ("--optimizer", "sgd", "--channels-last")
    kernels = ("default", "cudnn") if subject.is_vit else ("default",)
    for compiled in ("off", "default", "max-autotune-no-cudagraphs"):
        for kernel in kernels:
            words = "eager" if compiled == "off" else f"compiled ({compiled})"
            attention = f", {kernel} attention" if subject.is_vit else ""
            yield f"timm, autocast, {words}{attention}", (*own, "--compile", compiled, "--attention", kernel)
    yield (
        "timm, bfloat16 weights without masters, compiled (default)",
        (*own, "--compile", "default", "--weights", "bfloat16"),
    )


def command(rung: Rung, batch: int, file: Path, options: argparse.Namespace) -> list[str]:
    """The command line of a rung."""
    subject, counts = rung.subject, (options.steps, options.warmup_steps, options.repeats)
    if rung.peer == "benchmark":
        return benchmark_command(rung, batch, file, options)
    if rung.peer:
        line = [
            sys.executable, str(ROOT / "benchmarks" / "timm_step.py"), "--batch", str(batch), "--out", str(file),
            "--device", options.device, *rung.settings,
            *("--steps", str(counts[0]), "--warmup-steps", str(counts[1]), "--repeats", str(counts[2])),
        ]  # fmt: skip
        if options.shrink:
            return [*line, "--model", tiny(subject), "--image-size", "64", "--matmul-size", "64"]
        patch = ["--patch-size", str(subject.patch_size)] if subject.patch_size else []
        return [*line, "--model", subject.timm, *patch]
    overrides = [*PLAIN, f"data.global_batch_size={batch}", f"runtime.device={options.device}", "parallel=single"]
    if subject.is_vit and "speed=meta2022" not in rung.settings:
        overrides.append("model.classifier=token")
    if options.shrink:
        overrides += ["data.image_size=32", "matmul_size=64"]
        overrides += (
            ["model.width=16", "model.depth=2", "model.heads=2", "model.mlp_width=16"] if subject.is_vit else []
        )
        overrides += [] if subject.is_vit else ["model.depth=18"]
    return [
        sys.executable, str(ROOT / "tools" / "time_net.py"), "--config-name", subject.config, "mode=model",
        f"steps={counts[0]}", f"warmup_steps={counts[1]}", f"repeats={counts[2]}", f"output={file}",
        *overrides, *last_of_each(rung.settings),
    ]  # fmt: skip


def last_of_each(settings: Sequence[str]) -> list[str]:
    """Keep the last value of each key: Hydra accepts a group only once."""
    return list({setting.partition("=")[0]: setting for setting in settings}.values())


def benchmark_command(rung: Rung, batch: int, file: Path, options: argparse.Namespace) -> list[str]:
    """timm's `benchmark.py`: autocast, compiled, fast norms; other attention kernels disabled for cudnn."""
    mode, kernel = rung.settings
    off = "torch.backends.cuda.enable_flash_sdp(False); torch.backends.cuda.enable_mem_efficient_sdp(False); "
    shut = off + "torch.backends.cuda.enable_math_sdp(False); " if kernel == "cudnn" else ""
    start = f"import runpy, sys, torch; {shut}sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
    # It reports ten times and divides by the number of steps between reports.
    iterations = ("1", "10") if options.shrink else ("15", "40")
    line = [
        sys.executable, "-c", start, str(options.timm_source / "benchmark.py"), "--bench", "train", "-b", str(batch),
        "--model", tiny(rung.subject) if options.shrink else rung.subject.timm, "--num-classes", "1000",
        "--img-size", "64" if options.shrink else "224", "--amp", "--amp-dtype", "bfloat16", "--torchcompile",
        "--no-retry", "--num-warm-iter", iterations[0], "--num-bench-iter", iterations[1], "--device", options.device,
        "--results-file", str(file.with_suffix(".timm")), "--results-format", "json",
    ]  # fmt: skip
    if mode != "default":
        line += ["--torchcompile-mode", mode]
    if rung.subject.patch_size and not options.shrink:
        line += ["--model-kwargs", f"patch_size={rung.subject.patch_size}"]
    return [*line, *(["--fast-norm", "--opt", "adamw"] if rung.subject.is_vit else ["--channels-last", "--opt", "sgd"])]


def tiny(subject: Subject) -> str:
    """timm's model for `--shrink`."""
    return "test_vit" if subject.is_vit else "test_resnet"


def measure(rung: Rung, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run a rung and write its result; if it runs out of memory, try smaller batches."""
    file = rung.file(folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    batch = 4 if options.shrink else rung.subject.batch
    found: dict[str, Any] = {}
    for _ in range(1 + HALVINGS):
        found = attempt(command(rung, batch, file, options), rung, file, options.limit)
        if found["status"] != OUT_OF_MEMORY:
            break
        batch //= 2
    file.write_text(json.dumps({"rung": rung.name, **found}, indent=1) + "\n", encoding="utf-8")
    return found


def attempt(line: Sequence[str], rung: Rung, file: Path, limit: float) -> dict[str, Any]:
    """Run one process; returns its record, or one line that says why there is none."""
    file.unlink(missing_ok=True)
    try:
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"status": f"stopped after {limit:g} s"}
    if done.returncode == 0:
        if rung.peer == "benchmark":
            return timm_result(file.with_suffix(".timm"))
        return {"status": "ok", "record": json.loads(file.read_text(encoding="utf-8"))}
    if "OutOfMemoryError" in done.stderr or OUT_OF_MEMORY in done.stderr:
        return {"status": OUT_OF_MEMORY}
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    what = "refused" if done.returncode == 2 else "failed"
    return {"status": f"{what}: {lines[-1].removeprefix('error: ')[:200] if lines else f'status {done.returncode}'}"}


def timm_result(file: Path) -> dict[str, Any]:
    """What timm's `benchmark.py` wrote, under our keys; it measures no matrix product and no memory.

    Its status is 0 for models that failed, too.
    """
    result = json.loads(file.read_text(encoding="utf-8"))
    if "error" in result:
        said = str(result["error"])
        if OUT_OF_MEMORY in said.lower():
            return {"status": OUT_OF_MEMORY}
        first = said.partition("\n")[0]
        return {"status": f"failed: {first[:200]}"}
    rate, batch = float(result["train_samples_per_sec"]), int(result["train_batch_size"])
    train = {"images_per_second": rate, "step_seconds_p50": batch / rate}
    return {"status": "ok", "record": {"global_batch_size": batch, "train": train}}


def load(rung: Rung, folder: Path) -> dict[str, Any] | None:
    """A rung's result; None if there is none."""
    file = rung.file(folder)
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


COLUMNS = "| rung | batch | images/s | ms a step (p10 to p90) | TFLOP/s | MFU | of the bf16 product | memory, GiB |"
TABLES = {
    "ladder": "Each line includes the settings of those above it.",
    "preset": "Complete settings.",
    "timm": "timm's model.",
    "alone": f"One switch changed, on top of `{BASE}`.",
}


def page(chosen: Sequence[Subject], folder: Path, line: str) -> str:
    """The whole page, made from the records in the folder."""
    found = {subject: [(rung, load(rung, folder)) for rung in rungs(subject)] for subject in chosen}
    records = [r["record"] for pairs in found.values() for _, r in pairs if r is not None and "record" in r]
    machines = sorted({str(r["device"]) for r in records if "device" in r})
    versions = sorted({", ".join(f"{k} {v}" for k, v in r["versions"].items()) for r in records if "versions" in r})
    lines = [
        "# The training step on a GPU",
        "",
        f"Made by `{line}`.",
        f"Hardware: {'; '.join(machines) or 'not run'}. Versions: {'; '.join(versions) or 'not run'}.",
        "",
        "The whole step on one batch that is on the device: forward, loss, backward, optimizer. Operations are three",
        f"times the forward pass's, a multiply-add counted as 2; MFU is their share of {PEAK / 1e12:g} TFLOP/s. The",
        "bf16 product is one of 8192 x 8192 matrices of random values, measured in the same run.",
        "Rungs that ran out of memory were tried with half the batch. All rungs also have:",
        f"`{' '.join(PLAIN)}`.",
        "",
    ]
    for subject, pairs in found.items():
        lines += [f"## {subject.config}, 224 px", ""]
        lines += [f"Aim: {subject.aim}.", ""] if subject.aim else []
        flops = next((r["record"]["forward_flops_per_image"] for _, r in pairs if r and _ours(r)), None)
        for table, note in TABLES.items():
            lines += [note, "", COLUMNS, "|---|---|---|---|---|---|---|---|"]
            lines += [row(rung, result, flops) for rung, result in pairs if rung.table == table]
            lines.append("")
    return "\n".join(lines)


def _ours(result: Mapping[str, Any]) -> bool:
    return "forward_flops_per_image" in result.get("record", {})


def row(rung: Rung, result: Mapping[str, Any] | None, flops: int | None) -> str:
    """A rung's line of the table."""
    name = f"`{'+ ' if rung.table == 'ladder' and 'speed=reference' not in rung.name else ''}{rung.name}`"
    if rung.peer:
        name = rung.name
    if result is None or "record" not in result:
        return f"| {name} | | {'not run' if result is None else result['status']} | | | | | |"
    record = result["record"]
    part = record["train"]
    per_image = record.get("forward_flops_per_image", flops)
    achieved = 3 * per_image * part["images_per_second"] if per_image else None
    times = f"{1e3 * part['step_seconds_p50']:.1f}"
    if "step_seconds_p10" in part:
        times += f" ({1e3 * part['step_seconds_p10']:.1f} to {1e3 * part['step_seconds_p90']:.1f})"
    matmul = record.get("matmul")
    share = achieved and matmul and matmul["dtype"] == "bfloat16" and achieved / matmul["flops_per_second"]
    memory = part.get("memory_peak_bytes")
    cells = [
        str(record["global_batch_size"]),
        f"{part['images_per_second']:,.1f}",
        times,
        f"{achieved / 1e12:.1f}" if achieved else "",
        f"{achieved / PEAK:.1%}" if achieved else "",
        f"{share:.1%} of {matmul['flops_per_second'] / 1e12:.0f}" if share and matmul else "",
        f"{memory / 2**30:.1f}" if memory else "",
    ]
    return f"| {name} | {' | '.join(cells)} |"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(SUBJECTS), help="in this order")
    parser.add_argument("--select", default="*", help="only rungs whose 'table: name' matches, such as 'ladder:*'")
    parser.add_argument(
        "--budget", type=float, default=float("inf"), help="seconds after which no further rung is started"
    )
    parser.add_argument("--limit", type=float, default=900, help="time limit of a rung in seconds")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup-steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--again", action="store_true", help="also run rungs that have a result")
    parser.add_argument("--page-only", action="store_true", help="run nothing, only write the page")
    parser.add_argument("--timm-source", type=Path, help="a checkout of timm, for its benchmark.py")
    parser.add_argument("--shrink", action="store_true", help="tiny models, to try out this file")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--out", type=Path, default=PAGE, help="the page; records are kept in a folder of the same name beside it"
    )
    options = parser.parse_args(arguments)
    unknown = set(options.models.split(",")) - set(SUBJECTS)
    if unknown:
        parser.error(f"--models: {', '.join(sorted(unknown))}: unknown; use any of {', '.join(SUBJECTS)}")
    if options.timm_source is not None and not (options.timm_source / "benchmark.py").is_file():
        parser.error(f"--timm-source: {options.timm_source} has no benchmark.py")
    if not options.page_only and options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            parser.error(
                "--device: torch finds no CUDA device; use --page-only, or --shrink --device cpu to try it out"
            )
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing; write the page after every rung."""
    options = parse(arguments)
    # The page names the command that measured it.
    given = [part for part in (sys.argv[1:] if arguments is None else arguments) if part != "--page-only"]
    line = " ".join(["python", f"benchmarks/{Path(__file__).name}", *given])
    chosen = [SUBJECTS[name] for name in options.models.split(",")]
    folder = options.out.with_suffix("")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    if options.timm_source is None and not options.page_only:
        print("--timm-source is not given: the rungs with timm's benchmark.py are not run", flush=True)
    for rung in [] if options.page_only else [rung for subject in chosen for rung in rungs(subject)]:
        if not fnmatch.fnmatch(f"{rung.table}: {rung.name}", options.select):
            continue
        if rung.peer == "benchmark" and options.timm_source is None:
            continue
        if load(rung, folder) is not None and not options.again:
            continue
        if time.monotonic() - started > options.budget:
            print("the budget is used up; the same command resumes from here", flush=True)
            break
        found = measure(rung, folder, options)
        options.out.write_text(page(chosen, folder, line), encoding="utf-8")
        rate = (
            f"{found['record']['train']['images_per_second']:,.1f} images/s" if "record" in found else found["status"]
        )
        print(f"{rung.subject.config}  {rung.table}: {rung.name}: {rate}", flush=True)
    options.out.write_text(page(chosen, folder, line), encoding="utf-8")
    print(f"written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
