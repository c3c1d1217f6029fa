"""Loading: the dataset that workers run, the batches they send, the loader around them."""

from __future__ import annotations

import atexit
import errno
import math
import os
import signal
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from pycls_fast.counter import counter_seed
from pycls_fast.data.augment import NO_BOX, Box, Transform, TransformByEpoch
from pycls_fast.data.decode import DamagedImage
from pycls_fast.data.mix import Mixed
from pycls_fast.data.mix_elements import MixedElements
from pycls_fast.data.pictures import Decoder, open_with_pillow
from pycls_fast.data.sampling import Key, Keys
from pycls_fast.data.sources import Source
from pycls_fast.errors import UserError

Damage = tuple[str, str]
"""(name of the image, reason)."""

# Damaged images in a row after which training gives up.
_MOST_REPLACED = 16
_SHARED_MEMORY = Path("/dev/shm")
_MORE_SHARED_MEMORY = (
    "enlarge it (docker run --shm-size=8g, or --ipc=host), or lower data.num_workers, data.prefetch_factor or the "
    "batch (data.global_batch_size; of evaluations data.eval_batch_size)"
)

# The machine ran out of resources; the image may be fine.
_OUR_OWN_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@dataclass(frozen=True)
class Sample:
    """One image, ready for a batch."""

    image_HWC: np.ndarray | None
    """uint8; None for a damaged image that is left out."""
    label: int
    index: int
    erase: Box = NO_BOX
    damaged: tuple[Damage, ...] = ()
    """The damaged images met on the way to this one."""


@dataclass(frozen=True)
class Batch:
    """A batch on its way from the workers to the device, prepared as far as the workers go."""

    images_BHWC: torch.Tensor
    """uint8, a quarter of float32's bytes; float32 if the workers have normalised."""
    labels_B: torch.Tensor
    """int64."""
    indices_B: torch.Tensor
    """int64, positions in the source."""
    erase_B4: torch.Tensor | None
    """int64 boxes (top, left, height, width) that are still to be erased, all zeros for none; None if there is nothing
    to erase."""
    damaged: tuple[Damage, ...] = ()
    """Images that could not be used: replaced in training, left out in evaluation."""
    mixed: Mixed | MixedElements | None = None
    """How the workers have mixed the images; None if they have not."""

    def __len__(self) -> int:
        return len(self.labels_B)

    def pin_memory(self) -> Batch:
        """A copy in page-locked memory; DataLoader's pinning thread calls this."""
        return self._each(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Batch:
        """A copy on the device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tell the allocator that `stream` uses the tensors, which were made on another stream."""
        shares_B = self.mixed.lam_B if isinstance(self.mixed, MixedElements) else None
        for tensor in (self.images_BHWC, self.labels_B, self.indices_B, self.erase_B4, shares_B):
            if tensor is not None:
                tensor.record_stream(stream)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        mixed = self.mixed
        return replace(
            self,
            images_BHWC=change(self.images_BHWC),
            labels_B=change(self.labels_B),
            indices_B=change(self.indices_B),
            erase_B4=None if self.erase_B4 is None else change(self.erase_B4),
            mixed=MixedElements(change(mixed.lam_B)) if isinstance(mixed, MixedElements) else mixed,
        )


class HostStage(Protocol):
    """A stage that workers apply to a whole batch, with the seed of its microbatch (None in evaluation)."""

    def __call__(self, batch: Batch, seed: int | None) -> Batch: ...


class BatchSampler(Protocol):
    """Batches of (epoch, index), as `TrainSampler` and `EvalSampler` make them."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[list[Key]]: ...


class ImageDataset(Dataset[Sample]):
    """Reads, decodes and augments the images of a source; the keys are (epoch, index).

    A sample depends only on (seed, epoch, index) and the files, not on the worker or the order of visits.

    An image that cannot be read or decoded is reported in `damaged`. In training the next image of the source
    takes its place (in a class folder most likely of the same class) with this sample's own augmentation, so
    that batches keep their size. In evaluation it is left out, so that it can't count as right or wrong.
    """

    def __init__(
        self,
        source: Source,
        transform: Transform | TransformByEpoch,
        *,
        seed: int = 0,
        training: bool,
        host: HostStage | None = None,
        repeats: int = 1,
        open_picture: Decoder = open_with_pillow,
    ) -> None:
        """
        Args:
            seed: the augmentation's.
            host: a stage for the whole batch before it leaves the worker.
            training: replace damaged images instead of leaving them out.
            repeats: how often each image of an epoch is seen (`TrainSampler`).
            open_picture: how images are decoded (`pictures.DECODERS`).
        """
        self.source = source
        self.transform = transform
        self.seed = seed
        self.training = training
        self.host = host
        self._repeats = repeats
        self._open_picture = open_picture

    def __len__(self) -> int:
        return len(self.source)

    def instrumented(
        self, around_source: Callable[[Source], Source], around_decoder: Callable[[Decoder], Decoder]
    ) -> ImageDataset:
        """The same dataset with its source and its decoder wrapped, to measure their time."""
        other = copy(self)
        other.source = around_source(self.source)
        other._open_picture = around_decoder(self._open_picture)
        return other

    def __getitem__(self, key: Key) -> Sample:
        """One sample.

        Raises:
            UserError: in training, when too many images in a row are damaged.
        """
        epoch, position = key
        count = len(self.source)
        if not 0 <= position < count * self._repeats:
            raise IndexError(f"image {position} of {count}")
        repeat, index = divmod(position, count)
        seed = counter_seed(self.seed, epoch, index, repeat) if repeat else counter_seed(self.seed, epoch, index)
        transform = self.transform.at(epoch)
        damaged: list[Damage] = []
        for offset in range(min(_MOST_REPLACED + 1, count) if self.training else 1):
            try:
                return self._load((index + offset) % count, transform, seed, tuple(damaged))
            except DamagedImage as error:
                damaged.append((self.source.name((index + offset) % count), error.reason))
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
        transform = self.transform.at(keys[0][0] if keys else 0)
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

    def _load(self, index: int, transform: Transform, seed: int, damaged: tuple[Damage, ...]) -> Sample:
        try:
            data, label = self.source.read(index)
        except OSError as error:
            if error.errno in _OUR_OWN_ERRORS:
                raise
            raise DamagedImage(f"cannot be read: {error.strerror or error}") from error
        picture = self._open_picture(data)
        image_HWC, erase = transform(picture, seed)
        return Sample(image_HWC, label, index, erase, damaged)


def collate(samples: Iterable[Sample], *, count: int, image_size: int, erases: bool, shared: bool = False) -> Batch:
    """Collate samples; those without an image contribute only their damage report.

    Args:
        samples: each is copied into the batch as it comes, while it is in the CPU's cache.
        count: how many there are at most.
        shared: allocate the batch in memory that is shared with the main process, which saves a copy.

    Raises:
        UserError: shared memory is full.
    """
    images_BHWC = _empty_images((count, image_size, image_size, 3), shared)
    rows_BHWC = images_BHWC.numpy()
    whole: list[Sample] = []
    damaged: list[Damage] = []
    for sample in samples:
        damaged += sample.damaged
        if sample.image_HWC is not None:
            rows_BHWC[len(whole)] = sample.image_HWC
            whole.append(replace(sample, image_HWC=None))
    return Batch(
        images_BHWC=images_BHWC[: len(whole)],
        labels_B=torch.tensor([sample.label for sample in whole], dtype=torch.int64),
        indices_B=torch.tensor([sample.index for sample in whole], dtype=torch.int64),
        erase_B4=torch.tensor([s.erase for s in whole], dtype=torch.int64).reshape(-1, 4) if erases else None,
        damaged=tuple(damaged),
    )


def _empty_images(shape: tuple[int, ...], shared: bool) -> torch.Tensor:
    size = math.prod(shape)
    if not shared or not size:
        return torch.empty(shape, dtype=torch.uint8)
    if _SHARED_MEMORY.is_dir():
        # Writing more than is free there kills the process with a signal.
        status = os.statvfs(_SHARED_MEMORY)
        free = status.f_bavail * status.f_frsize
        if free < size:
            raise UserError(
                f"shared memory is full: {_SHARED_MEMORY} has {free / 2**20:,.0f} MiB free, a batch takes "
                f"{size / 2**20:,.0f} MiB; {_MORE_SHARED_MEMORY}"
            )
    storage = torch.UntypedStorage._new_shared(size)
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)


# Iterators whose workers may still run.
_running: weakref.WeakSet[_MultiProcessingDataLoaderIter] = weakref.WeakSet()


def _stop_workers(iterator: object) -> None:
    if not isinstance(iterator, _MultiProcessingDataLoaderIter):
        return
    iterator._shutdown_workers()
    for worker in iterator._workers:
        # Still reading after torch's timeout; it ignores torch's SIGTERM.
        if worker.is_alive():
            worker.kill()


@atexit.register
def _stop_all_workers() -> None:
    """End the workers of iterators that a traceback or a global variable keeps alive to the end.

    At exit multiprocessing sends SIGTERM to its children and waits for them without a timeout. Workers that ignore the
    signal must therefore be gone by then; the handler registered last runs first.
    """
    for iterator in list(_running):
        _stop_workers(iterator)


@contextmanager
def _workers_as_chosen() -> Iterator[None]:
    """Suppress torch's warning about more workers than cores: they help if loading waits for a network disk."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        yield


class ImageLoader(DataLoader[Any]):
    """A DataLoader of `Batch` that raises a `UserError` that a worker returned."""

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        with _workers_as_chosen():
            iterator = super().__iter__()
        if isinstance(iterator, _MultiProcessingDataLoaderIter):
            _running.add(iterator)
        try:
            for batch in iterator:
                if isinstance(batch, UserError):
                    raise batch
                yield batch
        except RuntimeError as error:
            death = _worker_death(str(error))
            if death is None:
                raise
            raise UserError(death) from error
        finally:
            _stop_workers(iterator)


def _worker_death(message: str) -> str | None:
    """The message for a worker that torch found dead; None if torch's `message` is about something else."""
    if not message.startswith("DataLoader worker"):
        return None
    what = message.splitlines()[0].removesuffix(" ").removesuffix(".")
    if "Bus error" in message:
        return f"{what}: shared memory ({_SHARED_MEMORY}) is full; {_MORE_SHARED_MEMORY}"
    return f"{what}; usually out of memory (see the kernel's log): lower data.num_workers or data.prefetch_factor"


def make_loader(
    dataset: ImageDataset,
    sampler: BatchSampler,
    *,
    num_workers: int,
    pin_memory: bool = False,
    prefetch_factor: int = 2,
) -> ImageLoader:
    """A loader of `Batch` in the sampler's order; what it yields does not depend on the number of workers.

    Args:
        num_workers: processes that read and decode; 0 for the calling process.
        pin_memory: put batches into page-locked memory, from which copies to a CUDA device run
            asynchronously.
        prefetch_factor: batches that each worker has ready or in progress.

    Raises:
        UserError: `pin_memory` without a CUDA device; while iterating, broken data, a dead worker or full shared
        memory.
    """
    if pin_memory and not torch.cuda.is_available():
        raise UserError("pinned memory needs a CUDA device; switch it off on this machine")
    with _workers_as_chosen():
        return ImageLoader(
            dataset,
            batch_sampler=sampler,
            num_workers=num_workers,
            collate_fn=_as_is,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor if num_workers else None,
            worker_init_fn=_start_worker,
            # Otherwise the loader would draw the workers' seeds from the global generator.
            generator=torch.Generator().manual_seed(dataset.seed),
        )


def _as_is(batch: Any) -> Any:
    # The dataset has already collated the batch.
    return batch


def _start_worker(worker: int) -> None:
    torch.set_num_threads(1)
    # A launcher signals the whole process group. Only the main process may decide what follows, e.g. to
    # finish the step and save; the workers end when it closes the loader or is gone.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
