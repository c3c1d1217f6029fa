"""Build what training needs from a configuration: data, network with its weights, step; not the run's folder.

`short_training` is for commands that only look at a few steps, which begin and end as those of any training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

from pycls_fast import build
from pycls_fast.config.keys import as_typed
from pycls_fast.config.run import RunConfig
from pycls_fast.data.batch import Batch
from pycls_fast.data.prepare import to_device
from pycls_fast.data.sources.base import Images
from pycls_fast.errors import UserError
from pycls_fast.network import Network
from pycls_fast.optim.owned_weights import LocalShards, OwnedWeights, local
from pycls_fast.parallel.fsdp import is_empty
from pycls_fast.parallel.saved_activations import save_activation_memory
from pycls_fast.parallel.world import World
from pycls_fast.speed import Speed
from pycls_fast.train.checkpoint import Checkpoint
from pycls_fast.train.display import Display
from pycls_fast.train.distill import build_distillation
from pycls_fast.train.evaluate import DamagedImages
from pycls_fast.train.folder import output_file
from pycls_fast.train.graphs import CudaRecorder, GraphedStep, make_recordable
from pycls_fast.train.load_weights import load_weights, trained_size
from pycls_fast.train.metrics import TrainMetrics
from pycls_fast.train.resolving import Resolved, resolve, resolve_before_data
from pycls_fast.train.run_state import Parts
from pycls_fast.train.step import PipelinedStep, Step
from pycls_fast.train.watchdog import Watchdog


def build_parts(config: RunConfig, world: World, display: Display, resumed_from: Checkpoint | None = None) -> Parts:
    """Build every part; each needs the ones before it. A checkpoint to resume from takes the place of `weights`."""
    config = resolve_before_data(config, world, resumed_from, note=display.note)
    resolved = resolve(config, world)
    build.check_mixing(resolved.config, world)
    loads = config.weights is not None and resumed_from is None
    weights = InitialWeights(resolved, world, display) if loads else None
    step = build_step(resolved, world, weights)
    if resumed_from is None:
        _check_head(resolved.config, step.network, world, is_new=weights is not None and weights.new_head)
    # A module of the user's own rarely has a head for these classes; a checkpoint's is trained.
    new_head = config.model.kind == "given" and resumed_from is None if weights is None else weights.new_head
    return Parts(**vars(resolved), step=step, new_head=new_head)


def build_step(resolved: Resolved, world: World, weights: InitialWeights | None = None) -> Step:
    """The training step around a new network."""
    config, switches, train = resolved.config, resolved.switches, resolved.sources["train"]
    network = build.trained_model(config, resolved.outputs, switches, world)
    if weights is not None and not is_empty(network):
        weights.load(network)
    network = build.place(config, network, world, switches)
    initialise = None if weights is None else partial(weights.load, network)
    step = make_step(config, network, world, switches, resolved.steps_per_epoch, initialise, train=train)
    step.sets_LK = build.label_sets(config, train, world.device)
    step.distillation = build_distillation(config, train, world, switches)
    network.taught = step.distillation is not None
    return step


@dataclass
class InitialWeights:
    """What `weights` names; once it is loaded, `new_head` says whether it left the head without values."""

    resolved: Resolved
    world: World
    display: Display
    new_head: bool = False

    def load(self, network: Network, flat: OwnedWeights | None = None) -> None:
        """Load the weights into the network, or into the flat shards that hold its weights, and report what was done
        to make them fit."""
        config, train = self.resolved.config, self.resolved.sources["train"]
        assert config.weights is not None
        if flat is not None:
            # A network that was flattened no longer has its names and shapes.
            network = build.model(config, self.resolved.outputs, self.resolved.switches, empty=True)
        weights, fitted = load_weights(
            network,
            config.weights,
            classes=train.classes,
            model=config.model.model_dump(mode="json"),
            allow=config.weights_allow,
            new_head="zero" if config.head == "zero" else "small",
            world=self.world,
            into=flat,
        )
        self.display.table("weights", fitted.table())
        size = trained_size(weights)
        if size is not None and size != config.data.image_size:
            self.display.note(
                f"data.image_size: {config.data.image_size} px here, but the weights are for {size} px; "
                f"data.image_size={as_typed(size.typed)} keeps that size"
            )
        has_seen_some = weights.train_names is not None and weights.trained_on(config.data.root)
        if has_seen_some and self.resolved.sources["val"].drawn and weights.train_names != train.names_id():
            self.display.note(
                f"weights: {config.weights} was trained on another random split of data.root, so that it has seen "
                "validation images of this run; the same data.val_fraction, data.split_seed, data.folds and data.fold "
                "keep it"
            )
        self.new_head = f"{network.head_name}.weight" in fitted.fresh


def _check_head(config: RunConfig, network: Network, world: World, *, is_new: bool) -> None:
    """Refuse to freeze a head that `weights` does not fill, and LAMB for one that starts at zero, which its trust ratio
    hardly changes.

    `config/conflicts.py` refuses what the configuration shows. But timm has models with such a head, and a head that
    `weights` does not fill keeps its initial values.
    """
    # Of a pipeline's stages only the last one has it.
    name, parameters = f"{network.head_name}.weight", dict(network.named_parameters())
    if is_new and config.head != "probe" and name in parameters and not parameters[name].requires_grad:
        raise UserError(
            f"optim.trainable: does not name {network.head_name}, for whose classes weights has no values, so that it "
            "would stay as it begins; add head, or use head=probe"
        )
    if not config.optim.trust_ratio or not config.optim.weight_decay:
        return
    if not any(world.gather(name in parameters and bool(local(parameters[name]).any()))):
        raise UserError(
            f"optim.name: {config.optim.name} hardly changes {network.head_name}, which begins with zeros: its steps "
            "are in proportion to the weights; use optim=adamw, or a model with another initial head"
        )


def make_step(
    config: RunConfig,
    network: Network,
    world: World,
    switches: Speed,
    steps_per_epoch: int,
    initialise: Callable[[OwnedWeights | None], None] | None = None,
    *,
    train: Images | None = None,
) -> Step:
    """The training step around a network that is on its device, and that is changed in place.

    The changes depend on each other in this order. Frozen parameters, and those of other stages, get no master, no
    exchange of gradients and no place in the optimizer's groups. The precision sets the format of the parameters that
    are exchanged or gathered. Recomputation and the offloading of activations replace `forward`, which `build.wrap`
    compiles and shards. `wrap` gives a network on the meta device memory, then its initial values, then those of
    `initialise`; for these it seeds torch's generator, on which no later number depends: each microbatch seeds it
    again. Optimizer, average and watchdog come last, because sharding replaces parameters and modules, and because the
    average and an optimizer on the host copy the values.
    """
    loss = build.loss(config, switches, world.device, network.last_layer().out_features, train)
    adapted = build.freeze(config, network)
    pipeline = build.split_into_stages(config, network, world)
    kind: Callable[..., Step] = Step if pipeline is None else PipelinedStep
    if switches.cuda_graphs == "on":
        make_recordable(network, world)
        kind = partial(GraphedStep, recorder=CudaRecorder(world.device))
    sharded = config.parallel.facts.shards_weights
    masters = build.apply_precision(config, network, world.device, sharded=sharded)
    save_activation_memory(network, network.units(), switches)
    wrapped = build.wrap(config, network, world, switches, initialise, pipeline)
    # Who holds the values that the optimizer changes: flat shards, masters, factors, local shards, or the network.
    in_place = sharded and wrapped.weights is None
    on_host = in_place and switches.param_offload == "cpu"
    scaler = build.loss_scaler(config, world.device, wrapped.shard_groups, on_host=on_host)
    plain = LocalShards if in_place and config.optim.elementwise else OwnedWeights
    weights = wrapped.weights or masters or build.low_rank(config, network, adapted, world) or plain(network)
    optimizer = wrapped.optimizer or build.optimizer(
        config, network, switches, weights, sharded=in_place, groups=wrapped.groups
    )
    return kind(
        network=network,
        wrapped=wrapped,
        weights=weights,
        parameters=weights.parameters,
        prepare=build.prepare(config, world.device, switches),
        mixer=build.mixer(config),
        loss=loss,
        autocast=build.autocast(config, world.device),
        scaler=scaler,
        optimizer=optimizer,
        schedule=build.schedule(config, steps_per_epoch),
        clip_norm=config.optim.clip_norm,
        clip_foreach=switches.clip == "foreach",
        ema=build.ema(config, weights, switches),
        seed=config.seed,
        rank=world.data_rank,
        accumulation_steps=config.optim.microbatches,
        watchdog=Watchdog(network, scaled=scaler.is_enabled()) if config.runtime.watchdog else None,
    )


@dataclass(kw_only=True)
class ShortTraining(Parts):
    """The parts of a training, the file for its result, and the microbatches on the device."""

    world: World
    display: Display
    metrics: TrainMetrics
    file: Path
    damaged: DamagedImages
    batches: Iterator[Batch]
    done: int = field(default=0, init=False)

    def train_step(self) -> None:
        self.world.at(f"computing step {self.done + 1}")
        self.step(self.done, islice(self.batches, self.config.optim.microbatches), self.metrics)
        self.done += 1


@contextmanager
def short_training(
    config: RunConfig, *, steps: int, output: str | Path, several_ranks: bool = False
) -> Iterator[ShortTraining]:
    """A context with a training of so many steps without a run, in one process unless `several_ranks`; damaged images
    are reported at the end."""
    with build.world(config) as world:
        if world.size > 1 and not several_ranks:
            raise UserError("WORLD_SIZE: a short training is looked at in one process; start without torchrun")
        file, display = output_file(output, world), Display(speaks=world.is_main, mode=config.runtime.progress)
        parts = build_parts(config, world, display)
        loader = build.train_loader(
            parts.config, parts.sources["train"], world, parts.switches, start_step=0, steps=steps
        )
        damaged = DamagedImages(config.data.max_damaged, world, display)
        batches = damaged.noting(to_device(loader, world.device, mode="blocking"))
        with closing(batches):
            metrics = TrainMetrics(world.device, read=parts.switches.metrics)
            yield ShortTraining(
                **vars(parts),
                world=world,
                display=display,
                metrics=metrics,
                file=file,
                damaged=damaged,
                batches=batches,
            )
        damaged.report()
