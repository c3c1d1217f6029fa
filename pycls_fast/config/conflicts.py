"""Settings that cannot be combined: one table, and the messages about its rows.

A row is (a, b, why, use): two conditions, why they cannot both hold, and the ways out. A condition is written
`key=value|value` or `key!=value`, or has a name. Rows with a switch that was not set by hand are checked when its value
on this machine is known (`switch_problems`), the others before torch is imported (`problems`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from pycls_fast.config.keys import as_typed
from pycls_fast.config.of_weights import SOURCES, none_at
from pycls_fast.config.run import RunConfig
from pycls_fast.config.sizes import misfits
from pycls_fast.data.source import ColumnSource
from pycls_fast.files import user_path, weights_at
from pycls_fast.precision import LEVELS, Level
from pycls_fast.speed import SWITCHES, Device, Speed
from pycls_fast.strategies import Strategy


@dataclass(frozen=True)
class Purpose:
    """What a configuration is used for, which decides what it must and must not contain."""

    needs_data: bool = True
    """False if nothing is read, so that `data.root` and the weights to fine-tune may be missing."""
    trains: bool = False
    """Whether the network is trained or that is planned, so that its initial weights matter."""
    scores_sets: bool = False
    """Whether `data.eval_set` is read; it is refused otherwise."""
    scores: bool = False
    """Whether trained weights are used as they are, so that `weights` must name them."""


@dataclass(frozen=True)
class Situation:
    """What a condition may look at; the switches have their values in force."""

    config: RunConfig
    speed: Speed
    device: Device
    purpose: Purpose

    @property
    def level(self) -> Level:
        return LEVELS[self.config.precision.name]

    @property
    def strategy(self) -> Strategy:
        """The strategy; that of several ranks, if it is chosen by their number."""
        return self.config.parallel.facts

    def shown(self, key: str) -> str:
        """The value of a key as it is typed; null if this configuration does not have it."""
        section, *rest = key.split(".")
        value: Any = self.speed if section == "speed" else getattr(self.config, section)
        for part in rest:
            value = getattr(value, part, None)
        return as_typed(value)


class Condition(NamedTuple):
    """A condition, and the key whose value is shown for it."""

    key: str
    holds: Callable[[Situation], bool]
    text: str = ""
    """As a row has it, if it is about the value of one key."""


def _condition(text: str | Condition) -> Condition:
    """The condition `key=value|value` or `key!=value`; one with a name is itself."""
    if isinstance(text, Condition):
        return text
    key, _, values = text.partition("=")
    name = key.removesuffix("!")
    return Condition(name, lambda now: (now.shown(name) in values.split("|")) != key.endswith("!"), text)


@dataclass(frozen=True)
class Conflict:
    """A row."""

    a: Condition
    b: Condition
    why: str
    use: str

    @cached_property
    def switches(self) -> set[str]:
        keys = (condition.key.partition(".") for condition in (self.a, self.b))
        return {name for section, _, name in keys if section == "speed"}

    def holds(self, now: Situation) -> bool:
        """Whether both conditions are met, and the network has the switches that they name."""
        concerned = all(SWITCHES[name].concerns(now.config.model) for name in self.switches)
        return concerned and self.a.holds(now) and self.b.holds(now)

    def line(self, now: Situation) -> tuple[str, str]:
        """The key, and what is wrong with its value and what to do."""
        with_it = f"{self.b.key}={now.shown(self.b.key)}"
        return self.a.key, f"{now.shown(self.a.key)} conflicts with {with_it}: {self.why}; use {self.use}"


# fmt: off
FOREIGN = Condition("model.kind", lambda now: now.config.model.kind not in ("vit", "resnet"))
DRAWS_ON_DEVICE = Condition("model.drop_path", lambda now: FOREIGN.holds(now) and now.config.model.drop_path > 0)
MICROBATCHES = Condition("optim.accumulation_steps", lambda now: now.config.optim.microbatches > 1)
SHARDED = Condition("parallel.name", lambda now: now.strategy.shards_weights)
RESHARDS = Condition(
    "parallel.reshard_after_forward",
    lambda now: now.strategy.has_dtensors and now.config.parallel.reshard_after_forward)
KEEPS_WEIGHTS = Condition("parallel.name", lambda now: not now.strategy.shards_weights)
FLATTENED = Condition("parallel.name", lambda now: now.strategy.flattens)
ONE_OWNER = Condition("parallel.name", lambda now: now.strategy.shards == "state")
NOT_DDP = Condition("parallel.name", lambda now: not now.strategy.replicates)
FREEZES_NOTHING = Condition("parallel.name", lambda now: not now.strategy.freezes)
NO_PARTS = Condition("parallel.name", lambda now: not now.strategy.has_dtensors)
IN_PARTS = Condition("parallel.name", lambda now: now.strategy.has_dtensors)
NO_STAGES = Condition("parallel.name", lambda now: not (now.strategy.replicates or now.strategy.has_dtensors))
NO_GROUPS = Condition("parallel.name", lambda now: not now.strategy.has_groups)
UNSCALED = Condition("precision.name", lambda now: not now.level.scaled)
HALF_WEIGHTS = Condition("precision.name", lambda now: now.level.weights != "float32")
WHOLE_HALF = Condition("precision.name", lambda now: now.level.weights != "float32" and not now.strategy.shards_weights)
NO_MASTERS = Condition("precision.name", lambda now: now.level.weights != "float32" and now.level.masters == "none")
WIDE_ON_CUDA = Condition("precision.name", lambda now: now.device == "cuda" and now.level.compute == "float32")
FLATTENED_HALF = Condition("precision.name", lambda now: now.strategy.flattens and now.level.weights != "float32")
NOT_ELEMENTWISE = Condition("optim.name", lambda now: not now.config.optim.elementwise)
KEEPS_STATE = Condition("optim.name", lambda now: not now.config.optim.sends_state)
COMPILES_ITSELF = Condition("optim.name", lambda now: now.config.optim.compiles_itself)
RUNS_PARTS_AGAIN = Condition("speed.recompute", lambda now: now.speed.recompute == "full" and (
    now.config.parallel.tensor_degree * now.config.parallel.expert_degree > 1))
NOT_SHARDABLE = Condition("optim.name", lambda now: not now.config.optim.shardable)
NOT_CAPTURABLE = Condition("speed.optimizer", lambda now: now.speed.optimizer not in now.config.optim.capturable)
# LAMB's step has the norm of the weights times lr, or Adam's without weight decay (`optim.lamb`).
TRUST_RATIO = Condition("optim.name", lambda now: (
    now.purpose.trains and now.config.optim.trust_ratio and now.config.optim.weight_decay > 0))
# Weights from elsewhere are rarely zero; `train/assemble.py` looks at the head.
FROM_ZEROS = Condition("optim.name", lambda now: TRUST_RATIO.holds(now) and now.config.weights is None)
ERASED_BY_WORKERS = Condition(
    "speed.erase_on", lambda now: now.speed.erase_on == "cpu" and now.config.augment.erase_probability > 0)
ERASED_ON_DEVICE = Condition(
    "speed.erase_on", lambda now: now.speed.erase_on == "device" and now.config.augment.erase_probability > 0)
MIXED_BY_WORKERS = Condition("speed.mix_on", lambda now: now.speed.mix_on == "cpu" and now.config.augment.mixes)
# The hub's splits have usual names.
NO_FILES = Condition(
    "data.train",
    lambda now: isinstance(data := now.config.data, ColumnSource) and data.source != "hub" and not data.train)
SEVERAL, ONE_LABEL = "data.label_separator!=null", "data.label_separator=null"
SOFTMAX = Condition("loss.name", lambda now: now.purpose.trains and now.config.loss.name == "cross_entropy")

_GRAPHS = "speed.compile_mode=reduce-overhead|max-autotune"
_NOT_GRAPHS = "speed.compile_mode=default"
_NO_RECORDING = "speed.cuda_graphs=off"
_SYNCED, _NOT_SYNCED = "parallel.sync_batchnorm=true", "parallel.sync_batchnorm=false"

# What asks the host within a step, why, and the value to use in a recorded one.
_ASKS_THE_HOST = (
    ("speed.metrics=step", "the host reads every loss", "speed.metrics=interval"),
    ("speed.drop_path_compute=skip", "shapes change in every step", "speed.drop_path_compute=multiply"),
    ("speed.recompute=full|selective", "it reads the state of random generators", "speed.recompute=off"),
    ("speed.activation_offload=cpu", "activations go through the host", "speed.activation_offload=none"),
    ("speed.param_offload=cpu", "the host updates the weights", "speed.param_offload=none"),
    ("runtime.watchdog=true", "it asks the host in every step", "runtime.watchdog=false"),
    (_GRAPHS, "it records its own graphs", _NOT_GRAPHS),
)

# What a network in parts on several ranks cannot carry, by the degrees that divide it.
_UNDIVIDED: tuple[tuple[str, str | Condition, str, str], ...] = (
    ("tensor expert", NO_PARTS, "the parts are those of fsdp and hsdp", "parallel=fsdp"),
    ("pipeline", NO_STAGES, "stages are those of ddp, fsdp and hsdp", "parallel=ddp"),
    ("tensor", "model.kind!=vit", "it divides the heads of this project's ViT", ""),
    ("pipeline", "model.kind!=vit", "it divides the blocks of this project's ViT", ""),
    ("expert", "model.experts=0|null", "the model has none", "model.experts=8"),
    ("tensor expert", NOT_ELEMENTWISE, "it needs whole weights", "optim=adamw"),
    ("pipeline", KEEPS_STATE, "rank 0 describes the state of its own stage", "optim=adamw"),
    ("pipeline", "optim.trainable!=[all]", "a stage may have nothing to train", "optim.trainable=[all]"),
    ("pipeline", "head=probe", "one process computes the features", "head=small"),
    ("tensor", "precision.name=fp8", "float8 layers are not divided", "precision=amp_bf16"),
    ("tensor", "parallel.sync_batchnorm=true", "it would count images twice", "parallel.sync_batchnorm=false"),
    ("pipeline", "parallel.sync_batchnorm=true", "only the first stage has any", "parallel.sync_batchnorm=false"),
    ("pipeline", "parallel.compression!=none", "the pipeline averages gradients itself", "parallel.compression=none"),
    ("tensor", "runtime.watchdog=true", "it cannot see inside divided blocks", "runtime.watchdog=false"),
    ("tensor", "speed.qkv=fused", "the three matrices are divided by heads", "speed.qkv=separate"),
    ("tensor", "speed.layout=batch_second", "tokens are divided as the second dimension", "speed.layout=batch_first"),
    ("tensor", "speed.linear=products", "it divides torch's linear layers", "speed.linear=torch"),
    ("tensor expert pipeline", "speed.compile=model", "ranks compute parts of it", "speed.compile=blocks"),
    ("tensor expert", "speed.recompute=selective|budget", "it chooses among operations of whole blocks",
     "speed.recompute=full"),
    ("tensor expert pipeline", "speed.activation_compression=8bit", "it rounds tensors of a whole network",
     "speed.activation_compression=none"),
    ("tensor expert pipeline", "speed.activation_offload=cpu", "it copies tensors of a whole network",
     "speed.activation_offload=none"),
    ("tensor expert pipeline", "speed.param_offload=cpu", "ranks on one device exchange there",
     "speed.param_offload=none"),
)

_ROWS: tuple[tuple[str | Condition, str | Condition, str, str], ...] = (
    # What is compiled.
    (f"{_GRAPHS}|max-autotune-no-cudagraphs", "speed.compile=off", "nothing is compiled", "speed.compile=model"),
    ("speed.gelu=polynomial", "speed.compile=off", "it is for compiled code", "speed.compile=model"),
    ("speed.recompute=budget", "speed.compile=off",
     "compiled code keeps it", "speed.compile=blocks or speed.recompute=full"),
    # Blocks share their code, and a graph the addresses of one block's weights.
    (_GRAPHS, "speed.compile=blocks", "it would record a graph for each block", "speed.compile=model"),
    (_GRAPHS, MICROBATCHES, "gradients are in memory of CUDA graphs, which the next microbatch overwrites",
     f"optim.accumulation_steps=1 or {_NOT_GRAPHS}"),
    (_GRAPHS, SHARDED, "weights are gathered into new memory, and graphs need them where they were", _NOT_GRAPHS),
    ("speed.activation_compression=8bit", "speed.compile=blocks|model",
     "it does not work inside compiled code", "speed.compile=off"),
    ("speed.activation_offload=cpu", "speed.compile=model",
     "it does not work inside compiled code", "speed.compile=blocks"),
    ("speed.drop_path_compute=skip", "speed.compile=blocks|model",
     "shapes change in every step, and compiled code needs constant ones",
     "speed.compile=off or speed.drop_path_compute=multiply"),
    ("speed.optimizer_compile=on", COMPILES_ITSELF, "it compiles its own parts", "speed.optimizer_compile=off"),
    ("speed.compile=blocks", RUNS_PARTS_AGAIN,
     "torch cannot run divided blocks again in compiled code", "speed.compile=off or speed.recompute=off"),
    ("runtime.watchdog=true", "speed.compile=blocks|model", "it cannot see inside compiled code", "speed.compile=off"),
    # What is recorded as a CUDA graph.
    *(("speed.cuda_graphs=on", other, why, use) for other, why, use in _ASKS_THE_HOST),
    ("speed.cuda_graphs=on", NOT_CAPTURABLE,
     "its lr is on the host (on the device with optim=adamw or sgd and speed.optimizer=fused)", _NO_RECORDING),
    ("speed.cuda_graphs=on", FOREIGN, "only our own networks are known to ask the host nothing", _NO_RECORDING),
    ("speed.cuda_graphs=on", MICROBATCHES, "one microbatch a step is recorded, and the host draws for each",
     f"optim.accumulation_steps=1 or {_NO_RECORDING}"),
    ("speed.cuda_graphs=on", "data.image_size_schedule!=[]",
     "images of one size are recorded", f"data.image_size_schedule=[] or {_NO_RECORDING}"),
    ("speed.cuda_graphs=on", NO_MASTERS,
     "the optimizer's weights have new memory in every step", f"precision=amp_bf16 or {_NO_RECORDING}"),
    # Nor would ranks that divide experts have as many tokens each.
    ("speed.drop_path_compute=skip", "model.experts!=0|null",
     "experts have room for all samples' tokens and are balanced over them",
     "speed.drop_path_compute=multiply or model.experts=0"),
    # Less memory.
    ("speed.param_offload=cpu", WHOLE_HALF,
     "it keeps its own float32 weights", "precision=amp_bf16 or speed.param_offload=none"),
    ("speed.activation_compression=8bit", "speed.recompute=full|selective|budget",
     "blocks would run again from rounded inputs", "speed.activation_compression=none or speed.recompute=off"),
    ("speed.activation_offload=cpu", "speed.recompute=selective|budget",
     "what recomputation keeps cannot be offloaded", "speed.recompute=full or speed.activation_offload=none"),
    # The compiler then draws the masks of timm's drop-path again, and the gradients are those of others.
    ("speed.recompute=budget", DRAWS_ON_DEVICE,
     "what is computed again would be drawn anew", "speed.recompute=full or model.drop_path=0"),
    # Images: decoded, normalised, erased, mixed.
    ("speed.decode_scale=dct", "speed.decode=pillow|simplejpeg",
     "only region decodes at a smaller size", "speed.decode=region or speed.decode_scale=full"),
    (ERASED_BY_WORKERS, "speed.normalize_on=device",
     "images are normalised before they are erased", "speed.erase_on=device or speed.normalize_on=cpu"),
    (MIXED_BY_WORKERS, ERASED_ON_DEVICE, "images are erased before they are mixed", "speed.mix_on=device"),
    (MIXED_BY_WORKERS, "speed.normalize_on=device",
     "images are normalised before they are mixed", "speed.mix_on=device"),
    ("data.sampling!=uniform", "data.shuffle=blocks", "it visits images in any order, not shard by shard",
     "data.shuffle=full or data.sampling=uniform"),
    ("data.shard_cache_gib!=null", "data.shard_cache=null", "it limits that folder",
     "data.shard_cache=copies or data.shard_cache_gib=null"),
    ("data.val!=null", NO_FILES, "those for training are not named", "data.train=FILES or data.val=null"),
    # Within the network.
    ("speed.qkv=fused", "precision.name=fp8", "one product bypasses the float8 layers", "speed.qkv=separate"),
    ("speed.linear=products", "precision.name=fp8", "they bypass the float8 layers", "speed.linear=torch"),
    ("speed.attention=sdpa_flash|sdpa_cudnn", WIDE_ON_CUDA,
     "on CUDA it needs 16 bits", "speed.attention=sdpa or precision=amp_bf16"),
    ("speed.attention=sdpa_cudnn", "runtime.deterministic=true",
     "it is not deterministic", "speed.attention=sdpa or runtime.deterministic=false"),
    ("speed.attention=sdpa_math|sdpa_flash|sdpa_efficient|sdpa_cudnn|products", "model.kind=timm",
     "timm's models choose between reference and sdpa", "speed.attention=sdpa"),
    ("speed.patches=product", "model.stem=conv", "there are no patches", "speed.patches=convolution"),
    ("speed.convolution=products", "speed.memory_format=contiguous",
     "it is for channels-last maps", "speed.memory_format=channels_last"),
    ("precision.name=fp8", "model.kind=resnet", "it is for linear layers", "precision=amp_bf16"),
    ("model.class_token=false", "model.classifier=token",
     "the classifier reads it", "model.class_token=true or model.classifier=pooled"),
    ("model.distillation_token=true", "model.classifier=pooled|map",
     "no token is read", "model.classifier=token or model.distillation_token=false"),
    ("model.groups!=1|null", "model.depth=18|34", "its blocks have no bottleneck to group", "model.depth=50"),
    ("model.width_per_group!=64|null", "model.depth=18|34", "its blocks have no bottleneck to widen", "model.depth=50"),
    ("model.drop_path!=0.0", "model.kind=given", "the module drops what it drops", "model.drop_path=0.0"),
    ("data.image_size_schedule!=[]", "model.kind=vit",
     "a ViT has positions for one image size", "data.image_size_schedule=[]"),
    ("model.experts=1", "model.experts_per_token=2",
     "there is no second one", "model.experts_per_token=1 or model.experts=2"),
    # Several ranks.
    ("parallel.shard_degree!=null", NO_GROUPS, "it is for groups of ranks",
     "parallel=hsdp or parallel.shard_degree=null"),
    ("parallel.replicate_degree!=null", NO_GROUPS, "it is for groups of ranks",
     "parallel=hsdp or parallel.replicate_degree=null"),
    *((f"parallel.{degree}_degree!=1", other, why, f"{use} or parallel.{degree}_degree=1".removeprefix(" or "))
      for degrees, other, why, use in _UNDIVIDED for degree in degrees.split()),
    ("parallel.pipeline_schedule=interleaved_zero_bubble|zbv", "speed.recompute=full|selective|budget",
     "it halves the backward pass, in which blocks would run again",
     "parallel.pipeline_schedule=1f1b or speed.recompute=off"),
    ("parallel.pipeline_schedule=interleaved_zero_bubble|zbv", "speed.compile=blocks",
     "it halves the backward pass, which compiled code has whole",
     "parallel.pipeline_schedule=1f1b or speed.compile=off"),
    # torch looks for the weights of their second half where a block's shards are by then.
    ("parallel.pipeline_schedule=interleaved_zero_bubble|zbv", RESHARDS,
     "it halves the backward pass, between whose halves weights have to stay",
     "parallel.pipeline_schedule=1f1b or parallel.reshard_after_forward=false"),
    ("parallel.reshard_after_forward=false", KEEPS_WEIGHTS,
     "it is for strategies that shard", "parallel.reshard_after_forward=true or parallel=fsdp"),
    ("parallel.compression!=none", NOT_DDP, "it is for ddp", "parallel.compression=none or parallel=ddp"),
    ("parallel.compression=fp16", UNSCALED, "without a scaled loss small gradients become 0 and large ones infinite",
     "parallel.compression=bf16 or precision=amp_fp16"),
    (_SYNCED, "model.kind=timm", "timm's batch norms may include an activation, which would be lost", _NOT_SYNCED),
    (_SYNCED, "model.stem=patch", "the network has no batch norm", _NOT_SYNCED),
    ("optim.lora_rank!=null", "optim.trainable=[all]", "all is trained already", "optim.trainable=head"),
    ("optim.lora_rank!=null", SHARDED, "it adapts whole weights", "parallel=ddp"),
    ("optim.lora_rank!=null", HALF_WEIGHTS, "its sums are in float32", "precision=amp_bf16"),
    ("optim.lora_rank!=null", TRUST_RATIO, "a factor that begins with zeros hardly changes",
     "optim=adamw or optim.weight_decay=0"),
    ("optim.lora_rank!=null", "speed.param_offload=cpu", "the factors are where the weights are",
     "speed.param_offload=none"),
    ("optim.lora_rank!=null", "speed.cuda_graphs=on", "it has not been tested in a recorded step", _NO_RECORDING),
    ("optim.trainable!=[all]", FREEZES_NOTHING,
     "it flattens or exchanges all weights alike", "parallel=ddp or parallel=fsdp"),
    (NO_MASTERS, SHARDED, "shards are float32", "precision=bf16_params or parallel=ddp"),
    (NOT_SHARDABLE, IN_PARTS, "it needs whole weights", "optim=adamw or parallel=ddp"),
    (NOT_ELEMENTWISE, FLATTENED, "it needs the shapes of weights", "optim=adamw or parallel=ddp"),
    ("precision.name=fp8", FLATTENED, "it needs the shapes of weights", "precision=amp_bf16 or parallel=fsdp"),
    ("speed.compile=blocks|model", FLATTENED_HALF,
     "it cannot see inside FairScale's wrappers around norms that stay float32", "speed.compile=off or parallel=fsdp"),
    (HALF_WEIGHTS, ONE_OWNER, "it shards the network's own weights", "precision=amp_bf16 or parallel=ddp"),
    (KEEPS_STATE, ONE_OWNER, "state is sent from rank to rank to be saved", "optim=adamw or parallel=ddp"),
    # What is learned.
    ("optim.decay_norms=true", FROM_ZEROS, "norms that begin with zeros hardly change", "optim.decay_norms=false"),
    ("optim.decay_biases=true", FROM_ZEROS, "biases begin with zeros and hardly change", "optim.decay_biases=false"),
    ("model.init=jax", FROM_ZEROS, "a head that begins with zeros hardly changes", "model.init=trunc_normal"),
    (SEVERAL, SOFTMAX, "an image may be of several classes", "loss=bce or loss=asymmetric"),
    (SEVERAL, "data.sampling!=uniform", "an image counts for several classes", "data.sampling=uniform"),
    ("schedule.best_metric=map", ONE_LABEL, "it is for images with several labels", "schedule.best_metric=top1"),
    ("schedule.best_metric=class_top1", SEVERAL, "it is for images with one label", "schedule.best_metric=map"),
    ("distill.teacher!=null", "loss.name=bce|asymmetric", "the teacher's target is that of a softmax",
     "loss.name=cross_entropy or distill.teacher=null"),
    ("distill.teacher!=null", "data.image_size_schedule!=[]", "the teacher is built for one size of images",
     "data.image_size_schedule=[] or distill.teacher=null"),
    ("speed.cuda_graphs=on", "distill.teacher!=null", "the teacher is not recorded", _NO_RECORDING),
    ("loss.bce_threshold!=null", "loss.class_weights=auto", "it rounds the shares of a mixed image, which are weighted",
     "loss.bce_threshold=null or loss.class_weights=none"),
    ("loss.class_weights!=none", "data.sampling!=uniform",
     "rare classes are already shown more often", "loss.class_weights=none or data.sampling=uniform"),
)
# fmt: on
CONFLICTS = tuple(Conflict(_condition(a), _condition(b), why, use) for a, b, why, use in _ROWS)


def problems(config: RunConfig, purpose: Purpose) -> Iterator[tuple[str, str]]:
    """Yield (key, what is wrong and what to do) for every impossible combination, except of switches that were not set
    by hand."""
    now = Situation(config, config.speed, "cpu", purpose)
    by_hand, kind = config.speed.by_hand, config.model.kind
    yield from _missing(config, purpose)
    yield from misfits(config)
    for name, value in by_hand.items():
        switch = SWITCHES[name]
        if not switch.concerns(config.model) and value != switch.reference:
            only = f"{value} is for model.kind={' and '.join(switch.models)} and has no effect with model.kind={kind}"
            yield f"speed.{name}", f"{only}; use speed.{name}={switch.reference}"
    yield from (row.line(now) for row in CONFLICTS if row.switches <= by_hand.keys() and row.holds(now))


def switch_problems(config: RunConfig, speed: Speed, device: Device) -> Iterator[tuple[str, str]]:
    """The same of all switches, with their values in force."""
    now = Situation(config, speed, device, Purpose())
    yield from (row.line(now) for row in CONFLICTS if row.switches and row.holds(now))


def _missing(config: RunConfig, purpose: Purpose) -> Iterator[tuple[str, str]]:
    fine_tunes = config.needs_weights or config.data.normalization == "weights" or config.optim.trainable != ("all",)
    # A resumed run has its weights in its checkpoint.
    needs_initial = purpose.trains and purpose.needs_data and config.resume in ("auto", "never") and fine_tunes
    if config.weights is None and (purpose.scores or needs_initial):
        scratch = ", or an experiment that begins without any (--config-name resnet18)" if purpose.trains else ""
        yield "weights", f"not set; give {SOURCES} as weights=SOURCE{scratch}"
    name = config.data.eval_set
    if not purpose.scores_sets and name is not None:
        yield "data.eval_set", "only pycls-fast test scores it; use data.eval_set=null"
    elif name is not None and config.data.eval_root is None:
        yield "data.eval_root", f"not set; give the files of data.eval_set={name} as data.eval_root=PATH"
    # Every evaluation set except ReaL has its own images.
    needs_root = purpose.needs_data and (purpose.trains or name in (None, "real"))
    if needs_root and config.data.needs_root and config.data.root is None:
        weights, folder = config.weights or ":", "the folder that holds train/ and val/ (or one folder per class)"
        # A run would bring its data.
        if ":" in weights or weights_at(user_path(weights)) is not None:
            yield "data.root", f"not set; give {folder} as data=PATH"
        else:
            yield "weights", none_at(weights)
