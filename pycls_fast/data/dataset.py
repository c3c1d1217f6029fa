"""The dataset that workers run: an image is read, decoded and augmented, and its batch collated."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

import numpy as np
from torch.utils.data import Dataset, get_worker_info

from pycls_fast.data.batch import Batch, Damage, HostStage, Sample, collate
from pycls_fast.data.decoders import DECODERS, Picture
from pycls_fast.data.sampling import Key, Keys
from pycls_fast.data.sources.base import Images
from pycls_fast.data.sources.remote import PAUSES
from pycls_fast.data.to_rgb import DamagedImage, why
from pycls_fast.data.transforms import Transform
from pycls_fast.errors import UserError
from pycls_fast.seeds import counter_seed

# Damaged images in a row after which training gives up.
_MOST_REPLACED = 16

# The machine ran out of resources; the image may be fine.
_OUR_OWN_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

# A network disk may be away for some seconds; a damaged sector of a local one gives EIO, too.
_PASSING_ERRORS = (
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN,
)  # fmt: skip


@dataclass(eq=False)
class ImageDataset(Dataset[Sample]):
    """Reads, decodes and augments the images of a source; the keys are (epoch, position).

    Positions beyond the last image are its further copies (index, index + count, index + 2 count ...), each augmented
    differently. A sample depends only on (seed, epoch, position) and the files, not on the worker or the order of
    visits. An image that cannot be read or decoded is reported in `damaged`. In training the next image of the source
    takes its place (in a class folder most likely of the same class) with this sample's own augmentation, so that
    batches keep their size. In evaluation it is left out, so that it can't count as right or wrong.
    """

    source: Images
    transform: Transform | Mapping[int, Transform]
    """One, or several by their first epoch, 0 among them: progressive resizing. A batch is of one epoch, hence of one
    size."""
    _: KW_ONLY
    training: bool
    """Replace damaged images instead of leaving them out."""
    seed: int = 0
    """The augmentation's."""
    host: HostStage | None = None
    """A stage for the whole batch before it leaves the worker."""
    open_picture: Callable[[bytes | np.ndarray], Picture] = DECODERS["pillow"]
    """How images are decoded."""
    _is_away: bool = field(default=False, init=False)

    def __len__(self) -> int:
        return len(self.source)

    def _transform(self, epoch: int) -> Transform:
        if not isinstance(self.transform, Mapping):
            return self.transform
        return self.transform[max(first for first in self.transform if first <= epoch)]

    def __getitem__(self, key: Key) -> Sample:
        """One sample.

        Raises:
            UserError: in training, when too many images in a row are damaged.
        """
        epoch, position = key
        count = len(self.source)
        repeat, index = divmod(position, count)
        seed = counter_seed(self.seed, epoch, index, repeat) if repeat else counter_seed(self.seed, epoch, index)
        transform = self._transform(epoch)
        damaged: list[Damage] = []
        for offset in range(min(_MOST_REPLACED + 1, count) if self.training else 1):
            own = (index + offset) % count
            try:
                image_HWC, erase = transform(self.open_picture(self._read(own)), seed)
                return Sample(image_HWC, int(self.source.labels[own]), own, erase, tuple(damaged))
            except DamagedImage as error:
                damaged.append((self.source.name(own), why(error)))
        if self.training:
            raise UserError(
                f"{len(damaged)} images in a row are damaged, so probably the whole dataset is; the first ones:",
                *(f"{name}: {reason}" for name, reason in damaged[:3]),
            )
        return Sample(None, label=-1, index=index, damaged=tuple(damaged))

    def __getitems__(self, keys: Sequence[Key]) -> Batch | UserError:
        """One batch, collated. DataLoader's workers call this.

        A `UserError` is returned, not raised: raised in a worker, it would arrive inside a traceback.
        """
        # Batches have images of one epoch, which is all that a transform depends on.
        transform = self._transform(keys[0][0] if keys else 0)
        try:
            batch = collate(
                (self[key] for key in keys),
                count=len(keys),
                image_size=transform.image_size,
                erases=transform.erases,
                # The host stage's result is in other memory anyway.
                shared=self.host is None and get_worker_info() is not None,
            )
        except UserError as error:
            return error
        if self.host is None:
            return batch
        return self.host(batch, keys.seed if isinstance(keys, Keys) else None)

    def _read(self, index: int) -> bytes | np.ndarray:
        """The stored image, with retries after errors that may pass."""
        # While the disk does not answer, there is no waiting for the next images.
        pauses = iter(() if self._is_away else PAUSES)
        while True:
            try:
                data = self.source.read(index)
            except OSError as error:
                self._is_away = error.errno in _PASSING_ERRORS
                pause = next(pauses, None) if self._is_away else None
                if pause is not None:
                    time.sleep(pause)
                elif error.errno in _OUR_OWN_ERRORS:
                    raise
                else:
                    raise DamagedImage(why(error)) from error
            else:
                self._is_away = False
                return data
