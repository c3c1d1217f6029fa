"""What the tools that score saved weights do first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pycls_fast import build
from pycls_fast.config.schema import RunConfig
from pycls_fast.errors import UserError
from pycls_fast.models import foreign
from pycls_fast.parallel import World
from pycls_fast.train.display import Display
from pycls_fast.train.normalization import timm_name
from pycls_fast.train.resolving import after_data, before_data
from pycls_fast.train.weights import find_weights, opened


@dataclass(frozen=True)
class Setup:
    """A process that is ready to score.

    Attributes:
        config: the user's, with the commit of `weights`, and with the weights' own preprocessing if that is used.
        weights: what `find_weights` found.
        preprocessing: the weights' own, if it is used.
        world: the ranks.
        switches: their resolved values.
        display: prints on the main rank.
    """

    config: RunConfig
    weights: Path | str
    preprocessing: foreign.Preprocessing | None
    world: World
    switches: build.Switches
    display: Display

    def with_data(self, images: int) -> Setup:
        """The setup once the number of images is known: every value is a number, and the batch is for scoring.

        Raises:
            UserError: see `after_data`.
        """
        # Nothing is trained, so nothing has to fit.
        config = self.config.with_values(optim={"accumulation_steps": self.config.optim.microbatches})
        config = after_data(config, images, self.world, note=self.display.note)
        return replace(self, config=build.for_scoring(config))


@contextmanager
def set_up(config: RunConfig, *, own_preprocessing: bool) -> Iterator[Setup]:
    """Join the ranks, find the weights and apply the settings of the process.

    Args:
        config: the user's.
        own_preprocessing: use the preprocessing that weights of other projects specify, if they do.

    Raises:
        UserError: no such weights, or settings that are not possible on this device.
    """
    if config.weights is None:
        raise UserError(
            "weights: not set; give a run folder, a weights file, timm:NAME, torchvision:NAME or hf:ORG/NAME as "
            "weights=SOURCE"
        )
    with build.world(config) as world:
        config = before_data(config, world)
        assert config.weights is not None
        found = find_weights(config.weights)
        about = foreign.described(found, model=_timm_name(config, found, world)) if own_preprocessing else None
        if about is not None:
            config = build.with_preprocessing(config, about)
        switches = build.switches(config, world.device)
        build.set_backend(config, world.device, switches)
        display = Display(speaks=world.is_main, mode=config.runtime.progress)
        yield Setup(config, found, about, world, switches, display)


def _timm_name(config: RunConfig, found: Path | str, world: World) -> str | None:
    """timm's name of the model, unless the weights are a run's, whose configuration has the preprocessing."""
    name = timm_name(config)
    ours = None if name is None else opened(found, world)
    return None if ours is not None and ours.config is not None else name
