"""Everything about a GPU in one command: what runs, how fast, beside timm's compiled models; at most 40 minutes.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --select "resnet50: *" --minutes 15
    python benchmarks/gpu.py --small --device cpu --out /tmp/gpu.md

The rows are in order of worth: the CUDA tests, the rate of the products that a ViT-H/16 consists of, its fastest
settings beside timm's model at the same batch, ResNet-50 likewise, single switches, then every rung from the reference
up. Each row is a process of its own (`tools/time_net.py`, or this file for timm's step and for products), so that a
failure does not affect the others; one that runs out of memory is tried with half the batch, down to an eighth. A row
is kept beside the page as soon as it is measured, and not run again: the same command resumes. Writes
docs/results/gpu.md.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results" / "gpu.md"
# Dense bf16 peak of an H100 or H200 SXM (NVIDIA's data sheet) in FLOP/s, the denominator of MFU.
PEAK = 989.4e12
HALVINGS = 3
OUT_OF_MEMORY = "out of memory"
CLASSES = 1000
TESTS = ("tests/cuda",)


@dataclass(frozen=True)
class Subject:
    """A model: its experiment, batch size, and name and arguments in timm."""

    config: str
    batch: int
    timm: str
    patch_size: int | None = None

    @property
    def is_vit(self) -> bool:
        return self.config.startswith("vit")


VIT = Subject("vit_h16", 256, "vit_huge_patch14_224", 16)
RESNET = Subject("resnet50", 1024, "resnet50")
# What a rank of eight has of the recipe's batch.
FEW = Subject("resnet50", 32, "resnet50")

# Only the network and its update, as in timm's step.
PLAIN = (
    "data=synthetic", "augment=none", "model.drop_path=0", "model.num_classes=1000", "loss.label_smoothing=0",
    "schedule=constant", "schedule.warmup_epochs=0", "schedule.final_factor=0", "optim.ema_decay=null",
    "optim.clip_norm=null", "optim.accumulation_steps=1",
)  # fmt: skip
BEST = "speed=fast precision=bf16_params"
VIT_SWITCHES = (
    f"{BEST} speed.attention=sdpa_cudnn",
    f"{BEST} speed.attention=sdpa_flash",
    f"{BEST} speed.patches=convolution",
    f"{BEST} speed.compile_mode=max-autotune-no-cudagraphs",
    f"{BEST} speed.compile=off",
    "speed=fast precision=fp8",
    f"{BEST} parallel=fsdp",
    f"{BEST} parallel=ddp",
    f"{BEST} speed.recompute=budget",
    f"{BEST} speed.recompute=budget parallel.recompute_budget=0.3",
    f"{BEST} speed.recompute=full",
    f"{BEST} model.drop_path=0.3",
    f"{BEST} optim.ema_decay=0.9999",
)
RESNET_SWITCHES = (
    "speed=fast precision=bf16_params",
    "speed=fast precision=amp_bf16 speed.compile_mode=max-autotune-no-cudagraphs",
    "speed=fast precision=amp_bf16 speed.compile=off",
)
# Each line includes the settings of those above it. Later values of a key win.
LADDER = (
    "speed=reference precision=fp32",
    "precision=tf32",
    "precision=amp_bf16",
    "speed.memory_format=channels_last",
    "speed.attention=sdpa speed.qkv=fused speed.patches=product",
    "speed.metrics=interval speed.optimizer=fused speed.ema=foreach speed.clip=foreach",
    "speed.compile=blocks",
    "precision=bf16_params",
    "speed.cuda_graphs=on",
)


@dataclass(frozen=True)
class Row:
    """One measurement: of ours with these overrides, or of what `kind` names, which gets `options`."""

    subject: Subject
    table: str
    name: str
    settings: tuple[str, ...] = ()
    kind: str = "ours"
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.subject.config}: {self.table}: {self.name}"

    def file(self, folder: Path) -> Path:
        # Hydra does not accept "=" in a value, and time_net.py is given this path.
        slug = re.sub(r"[^a-z0-9.]+", "_", f"{self.table}_{self.subject.batch}_{self.name}".lower()).strip("_")
        return folder / self.subject.config / f"{slug}.json"


def rows() -> Iterator[Row]:
    """Everything to measure, the most valuable first."""
    yield Row(VIT, "tests", "pytest -m cuda", TESTS, kind="tests")
    yield Row(VIT, "products", "each product of a block", kind="products")
    yield _ours(VIT, "fastest", BEST)
    yield _timm(VIT, "default", "default")
    yield _ours(VIT, "fastest", "speed=fast precision=amp_bf16")
    yield from (_ours(VIT, "switches", text) for text in VIT_SWITCHES[:2])
    yield _timm(VIT, "default", "cudnn")
    for subject in (RESNET, FEW):
        best = "speed=fast precision=amp_bf16"
        yield _ours(subject, "fastest", best)
        if subject is FEW:
            # `fast` replays such small steps.
            yield _ours(subject, "fastest", f"{best} speed.compile=model")
            yield _ours(subject, "fastest", f"{best} parallel=ddp")
            yield _timm(subject, "reduce-overhead", "default")
        yield _timm(subject, "default", "default")
    yield from (_ours(VIT, "switches", text) for text in VIT_SWITCHES[2:])
    yield from (_ours(RESNET, "switches", text) for text in RESNET_SWITCHES)
    for batch in (384, 128, 64):
        yield _ours(Subject("vit_h16", batch, VIT.timm, VIT.patch_size), "batches", BEST)
    for subject in (VIT, RESNET):
        held: list[str] = []
        for added in LADDER:
            changed = added.split()
            if not subject.is_vit:
                changed = [text for text in changed if not re.match(r"speed\.(attention|qkv|patches)", text)]
                changed = [text.replace("compile=blocks", "compile=model") for text in changed]
            if changed:
                held += changed
                yield Row(subject, "ladder", " ".join(changed), tuple(held))
    yield _timm(VIT, "max-autotune-no-cudagraphs", "default")
    yield _timm(VIT, "off", "default")
    yield _timm(RESNET, "off", "default")


def _ours(subject: Subject, table: str, text: str) -> Row:
    return Row(subject, table, text, tuple(text.split()))


def _timm(subject: Subject, compiled: str, attention: str) -> Row:
    """timm's model under autocast in a plain loop, compiled in a mode or not."""
    name = "timm, eager" if compiled == "off" else f"timm, compiled ({compiled})"
    name += f", {attention} attention" if subject.is_vit else ""
    own = {"optimizer": "adamw" if subject.is_vit else "sgd", "channels_last": not subject.is_vit}
    return Row(subject, "fastest", name, kind="timm", options={**own, "compile": compiled, "attention": attention})


def command(row: Row, batch: int, file: Path, options: argparse.Namespace) -> list[str]:
    """The command line of a row."""
    subject = row.subject
    if row.kind == "tests":
        # A CPU has the cases of two ranks, of which one says that they run.
        what = ["cuda"] if options.device == "cuda" else ["not cuda", "-k", "ddp-bf16_params-off"]
        # All three files at once: most of their time is compiling.
        return [sys.executable, "-m", "pytest", "-q", "-n", "3", "--dist", "loadfile", "-m", *what, *row.settings]
    if row.kind != "ours":
        network = {"model": subject.timm, "image_size": 224, "patch_size": subject.patch_size}
        if options.small:
            network = {"model": "test_vit" if subject.is_vit else "test_resnet", "image_size": 64, "patch_size": None}
        same = {key: getattr(options, key) for key in ("device", "small", "steps", "warmup_steps", "repeats")}
        given = {"kind": row.kind, "batch": batch, "out": str(file), **row.options, **network, **same}
        return [sys.executable, __file__, "--child", json.dumps(given)]
    overrides = [*PLAIN, f"data.global_batch_size={batch}", f"runtime.device={options.device}"]
    if subject.is_vit:
        overrides.append("model.classifier=token")
    if options.small:
        overrides += ["data.image_size=32", "matmul_size=64"]
        overrides += ["model.width=16", "model.depth=2", "model.heads=2", "model.mlp_width=16"] * subject.is_vit
        overrides += ["model.depth=18"] * (not subject.is_vit)
        if not any(word in row.name for word in ("compile", "budget")):
            # What the preset compiles would take most of the time.
            overrides.append("speed.compile=off")
    return [
        sys.executable, str(ROOT / "tools" / "time_net.py"), "--config-name", subject.config, "mode=train",
        *(f"{key}={getattr(options, key)}" for key in ("steps", "warmup_steps", "repeats")), f"output={file}",
        *overrides, *_last_of_each(["parallel=single", *row.settings]),
    ]  # fmt: skip


def _last_of_each(settings: Sequence[str]) -> list[str]:
    """Keep the last value of each key: Hydra accepts a group only once."""
    return list({setting.partition("=")[0]: setting for setting in settings}.values())


def measure(row: Row, folder: Path, options: argparse.Namespace, ends: float = math.inf) -> dict[str, Any]:
    """Run a row and write its result; if it runs out of memory, try smaller batches.

    Args:
        ends: when it is stopped at the latest, by `time.monotonic`; it then has no result.
    """
    file = row.file(folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    batch = 4 if options.small else row.subject.batch
    found: dict[str, Any] = {}
    for _ in range(1 + HALVINGS):
        # The tests train and compile several dozen cases.
        limit = min(options.limit * (2 if row.kind == "tests" else 1), ends - time.monotonic())
        found = attempt(command(row, batch, file, options), row, file, limit)
        if found["status"] != OUT_OF_MEMORY:
            break
        batch //= 2
    if "record" in found and row.kind == "ours":
        found["planned_bytes"] = planned(found["record"], options.device)
    if time.monotonic() < ends or "record" in found:
        file.write_text(json.dumps({"row": row.name, **found}, indent=1) + "\n", encoding="utf-8")
    return found


def planned(record: Mapping[str, Any], device: str) -> float:
    """Bytes of the memory plan for what was measured."""
    import torch

    from pycls_fast.config.run import RunConfig
    from pycls_fast.plan.memory_plan import MemoryPlan

    config = RunConfig.model_validate_json(json.dumps(record["config"]))
    made = MemoryPlan.imagined(config, torch.device(device), classes=record["num_classes"])
    return made.peak(record["accumulation_steps"])


def attempt(line: Sequence[str], row: Row, file: Path, limit: float) -> dict[str, Any]:
    """Run one process; returns its record, or one line that says why there is none."""
    file.unlink(missing_ok=True)
    try:
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"status": f"stopped after {limit:g} s"}
    if row.kind == "tests":
        # "12 passed, 1 skipped in 34.56s", or what failed.
        failed = [text for text in done.stdout.splitlines() if text.startswith(("FAILED", "ERROR"))]
        last = (done.stdout.strip() or done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
        return {"status": last.strip("= "), "failed": failed}
    if done.returncode == 0:
        return {"status": "ok", "record": json.loads(file.read_text(encoding="utf-8"))}
    if "OutOfMemoryError" in done.stderr or OUT_OF_MEMORY in done.stderr:
        return {"status": OUT_OF_MEMORY}
    if done.returncode < 0:
        # Its last line is a note on something else.
        return {"status": f"killed by {signal.Signals(-done.returncode).name}"}
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    what = "refused" if done.returncode == 2 else "failed"
    return {"status": f"{what}: {lines[-1].removeprefix('error: ')[:200] if lines else f'status {done.returncode}'}"}


def load(row: Row, folder: Path) -> dict[str, Any] | None:
    """A row's result; None if there is none."""
    file = row.file(folder)
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


HEAD = "| settings | batch | images/s | ms (p10 to p90) | TFLOP/s | MFU | of the product | of timm | GiB | plan |"
TABLES = {
    "fastest": "Beside timm's model, under autocast, in a plain loop with a fused optimizer; ratios are to its first "
    "compiled row at the same batch.",
    "switches": "One change.",
    "batches": "Other batch sizes.",
    "ladder": "Each line includes the settings of those above it.",
}


def page(folder: Path, line: str) -> str:
    """The whole page, made from the records in the folder."""
    found = [(row, load(row, folder)) for row in rows()]
    records = [r["record"] for _, r in found if r is not None and "record" in r]
    machines = sorted({str(r["device"]) for r in records if "device" in r})
    versions = sorted({", ".join(f"{k} {v}" for k, v in r["versions"].items()) for r in records if "versions" in r})
    tests = next((r for row, r in found if row.kind == "tests"), None)
    text = [
        "# A GPU",
        "",
        f"Made by `{line}`.",
        f"Hardware: {'; '.join(machines) or 'not run'}. Versions: {'; '.join(versions) or 'not run'}.",
        "",
        "The whole step on one batch that is on the device: forward, loss, backward, optimizer. Operations are three",
        f"times the forward pass's, a multiply-add counted as 2; MFU is their share of {PEAK / 1e12:g} TFLOP/s. The",
        "product is one of 8192 x 8192 matrices of random values, sustained, between the turns of the same row; memory",
        "is the allocator's peak, beside the memory plan's. All rows of ours also have:",
        f"`{' '.join(PLAIN)}`.",
        "",
        f"Tests (`{' '.join(TESTS)}`): {'not run' if tests is None else tests['status']}.",
        *(f"- {failed}" for failed in (tests or {}).get("failed", ())),
        "",
    ]
    for config in dict.fromkeys(row.subject.config for row, _ in found):
        own = [(row, r) for row, r in found if row.subject.config == config]
        text += [f"## {config}, 224 px", ""]
        products = next((r for row, r in own if row.kind == "products"), None)
        if products is not None:
            text += [*_products(products), ""]
        for table, note in TABLES.items():
            pairs = [(row, r) for row, r in own if row.table == table]
            if pairs:
                text += [note, "", HEAD, "|---|---|---|---|---|---|---|---|---|---|"]
                text += [_line(row, r, _flops(own), _rates_of_timm(own)) for row, r in pairs]
                text.append("")
    return "\n".join(text)


def _flops(pairs: Sequence[tuple[Row, Any]]) -> int | None:
    """Operations of our network's forward pass of an image; timm's differ by the classifier."""
    ours = (r["record"] for row, r in pairs if r is not None and "record" in r and row.kind == "ours")
    return next((record["forward_flops_per_image"] for record in ours), None)


def _rates_of_timm(pairs: Sequence[tuple[Row, Any]]) -> dict[int, float]:
    """Images a second of the first compiled row of timm's at each batch size."""
    rates: dict[int, float] = {}
    for row, r in pairs:
        if r is not None and "record" in r and row.kind == "timm" and "eager" not in row.name:
            record = r["record"]
            rates.setdefault(record["global_batch_size"], record["train"]["images_per_second"])
    return rates


def _line(row: Row, result: Mapping[str, Any] | None, flops: int | None, timm: Mapping[int, float]) -> str:
    """A row of a table."""
    name = row.name if row.kind == "timm" else f"`{row.name}`"
    if row.table == "ladder" and "speed=reference" not in row.name:
        name = f"+ {name}"
    if result is None or "record" not in result:
        status = "not run" if result is None else result["status"].replace("|", "/")
        return f"| {name} | {row.subject.batch} | {status} | | | | | | | |"
    record = result["record"]
    part, batch, matmul = record["train"], record["global_batch_size"], record.get("matmul")
    rate = part["images_per_second"]
    achieved = 3 * flops * rate if flops else None
    product = matmul["flops_per_second"] if matmul and matmul["dtype"] == "bfloat16" else None
    memory, plan = part.get("memory_peak_bytes"), result.get("planned_bytes")
    cells = [
        str(batch),
        f"{rate:,.1f}",
        f"{1e3 * part['step_seconds_p50']:.1f} ({1e3 * part['step_seconds_p10']:.1f} to "
        f"{1e3 * part['step_seconds_p90']:.1f})",
        f"{achieved / 1e12:.1f}" if achieved else "",
        f"{achieved / PEAK:.1%}" if achieved else "",
        f"{achieved / product:.1%} of {product / 1e12:.0f}" if achieved and product else "",
        f"{rate / timm[batch]:.3f}" if batch in timm else "",
        f"{memory / 2**30:.1f}" if memory else "",
        f"{plan / 2**30:.1f}" if plan else "",
    ]
    return f"| {name} | {' | '.join(cells)} |"


def _products(result: Mapping[str, Any]) -> list[str]:
    if "record" not in result:
        return [f"Products of a block: {result['status']}."]
    record = result["record"]
    seconds = f"{record['seconds']:g} s"
    return [
        f"The products of a block at {record['batch']} images, each for {seconds}, rates of the last half:",
        "",
        "| product (rows x inner x columns) | TFLOP/s |",
        "|---|---|",
        *(f"| {product['name']} | {product['flops_per_second'] / 1e12:.1f} |" for product in record["products"]),
        "",
        f"In proportion to their operations: {record['flops_per_second'] / 1e12:.1f} TFLOP/s, which no step of these "
        f"products exceeds. `scaled_dot_product_attention` takes {record['attention']} for these queries.",
    ]


# What the processes of this file measure.


def timm_step(options: argparse.Namespace) -> dict[str, Any]:
    """The training step of timm's model in a plain loop; a record with the keys of `time_net.py`."""
    import timm
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from pycls_fast.ledger.measure.device import DeviceMemory, MatmulPeak, time_calls
    from pycls_fast.ledger.measure.variant import part_record
    from pycls_fast.ledger.measure.workloads import Turn
    from pycls_fast.models.complexity import complexity
    from pycls_fast.parallel.world import World
    from pycls_fast.train.environment import device_name, versions

    def model() -> torch.nn.Module:
        sizes: dict[str, Any] = {"img_size": options.image_size} if "vit" in options.model else {}
        sizes |= {"patch_size": options.patch_size} if options.patch_size else {}
        # `vit_huge_patch14_224` has no head by default.
        made: torch.nn.Module = timm.create_model(options.model, num_classes=CLASSES, **sizes)
        return made

    device = torch.device(options.device)
    torch.backends.cudnn.benchmark = device.type == "cuda"
    world = World(rank=0, size=1, device=device)
    peak = MatmulPeak(torch.bfloat16, world, 64 if options.small else None)
    memory, size = DeviceMemory(device), options.image_size
    torch.manual_seed(0)
    with torch.device("meta"):
        counted = complexity(model(), image_size=size)
    with memory.during("train"):
        network = model().train().to(device)
        images_BCHW = torch.randn(options.batch, 3, size, size, device=device)
        if options.channels_last:
            network = network.to(memory_format=torch.channels_last)
            images_BCHW = images_BCHW.to(memory_format=torch.channels_last)
        labels_B = torch.randint(0, CLASSES, (options.batch,), device=device)
        optimizer: torch.optim.Optimizer
        if options.optimizer == "adamw":
            optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
        else:
            optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=True)
        how: dict[str, Any] = {} if options.compile == "default" else {"mode": options.compile}
        if options.small:
            how = {"backend": "eager"}
        forward = network if options.compile == "off" else torch.compile(network, **how)

        def step() -> None:
            with torch.autocast(device.type, torch.bfloat16):
                logits_BK = forward(images_BCHW)
            F.cross_entropy(logits_BK.float(), labels_B).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        turns = []
        only_cudnn = options.attention == "cudnn" and device.type == "cuda"
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if only_cudnn else nullcontext():
            time_calls(step, options.warmup_steps, device)
            for _ in range(options.repeats):
                peak.measure()
                seconds = time_calls(step, options.steps, device)
                turns.append(Turn(tuple(seconds), sum(seconds)))
    return {
        "device": device_name(device),
        "versions": versions(),
        "global_batch_size": options.batch,
        "matmul": peak.record(),
        "train": part_record(
            "train",
            turns,
            images_per_step=options.batch,
            forward_flops_per_image=counted.forward_flops,
            matmul_flops_per_second=peak.record()["flops_per_second"],
            memory_peak_bytes=memory.peaks.get("train"),
        ),
    }


def products(options: argparse.Namespace) -> dict[str, Any]:
    """The rates of a ViT-H/16 block's products in bfloat16, sustained: a chip that is busy for a second draws its full
    power and clocks lower than in a burst. And the kernel that torch's attention takes."""
    import torch

    from pycls_fast.ledger.measure.device import sustained_seconds
    from pycls_fast.train.environment import device_name, versions

    device = torch.device(options.device)
    width, hidden, tokens, heads = (32, 64, 4, 2) if options.small else (1280, 5120, 197, 16)
    seconds = 0.02 if options.small else 1.0
    rows_, found = options.batch * tokens, []
    operations = spent = 0.0
    for name, inner, columns in (
        ("queries, keys, values", width, 3 * width),
        ("projection", width, width),
        ("first of the MLP", width, hidden),
        ("second of the MLP", hidden, width),
    ):
        # Forwards, the gradient of the input, and that of the weights.
        for m, k, n in ((rows_, inner, columns), (rows_, columns, inner), (columns, rows_, inner)):
            a_MK, b_KN = torch.randn(m, k, device=device).bfloat16(), torch.randn(k, n, device=device).bfloat16()
            out_MN = torch.empty(m, n, device=device, dtype=torch.bfloat16)
            each = sustained_seconds(partial(torch.mm, a_MK, b_KN, out=out_MN), device, seconds)
            found.append({"name": f"{name}: {m} x {k} x {n}", "flops_per_second": 2 * m * k * n / each})
            operations, spent = operations + 2 * m * k * n, spent + each
    queries_BHNE = torch.randn(options.batch, heads, tokens, width // heads, device=device).bfloat16()
    choice = torch._fused_sdp_choice(queries_BHNE, queries_BHNE, queries_BHNE)
    kernels = {value: name for name, value in vars(torch.nn.attention.SDPBackend).items() if name.isupper()}
    return {
        "device": device_name(device),
        "versions": versions(),
        "batch": options.batch,
        "seconds": seconds,
        "products": found,
        "flops_per_second": operations / spent,
        "attention": next((name for value, name in kernels.items() if int(value) == choice), str(choice)),
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--select", default="*", help="only rows whose 'model: table: name' matches")
    parser.add_argument("--minutes", type=float, default=40.0, help="stop then; a row that is cut off is not kept")
    parser.add_argument("--limit", type=float, default=480, help="seconds that a row may take; the tests twice that")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup-steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--again", action="store_true", help="also run rows that have a result")
    parser.add_argument("--page-only", action="store_true", help="run nothing, only write the page")
    parser.add_argument("--small", action="store_true", help="tiny models, to try out this file")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--out", type=Path, default=PAGE, help="the page; records are in a folder of its name beside it"
    )
    # The options, as JSON, of a process that this file starts.
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is None and not options.page_only and options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            parser.error("--device: torch finds no CUDA device; use --page-only, or --small --device cpu to try it out")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing; write the page after every row."""
    options = parse(arguments)
    if options.child is not None:
        asked = argparse.Namespace(**json.loads(options.child))
        record = {"timm": timm_step, "products": products}[asked.kind](asked)
        Path(asked.out).write_text(json.dumps(record) + "\n", encoding="utf-8")
        return 0
    # The page names the command that measured it.
    given = [part for part in (sys.argv[1:] if arguments is None else arguments) if part != "--page-only"]
    line = " ".join(["python", f"benchmarks/{Path(__file__).name}", *given])
    folder = options.out.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * options.minutes
    chosen = [row for row in rows() if fnmatch.fnmatch(row.label, options.select)]
    for row in [] if options.page_only else chosen:
        if load(row, folder) is not None and not options.again:
            continue
        found = measure(row, folder, options, ends)
        if not row.file(folder).exists():
            print("the time is over; the same command goes on from here", flush=True)
            break
        options.out.write_text(page(folder, line), encoding="utf-8")
        rate = found["record"].get("train", {}).get("images_per_second") if "record" in found else None
        print(f"{row.label}: {found['status'] if rate is None else f'{rate:,.1f} images/s'}", flush=True)
    options.out.write_text(page(folder, line), encoding="utf-8")
    print(f"written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
