"""Gradients exchanged as low-rank matrices (Vogels et al., PowerSGD, NeurIPS 2019), by torch's communication hook.

A step's compression error is added to the next step's gradient (error feedback). torch keeps the error by bucket, and
buckets change whenever a process starts; here it can be read and loaded by parameter.
"""

# No postponed annotations: DDP inspects those of a hook.
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

from pycls_fast.seeds import counter_seed


class PowerSGD:
    """The hook and its state.

    Steps before `start_step` are exchanged uncompressed, and so is the step after `carried` or `load`: every rank adds
    its accumulated error to its gradient, so that nothing is lost and nothing is carried over. A resumed run therefore
    computes the same as the run that wrote the checkpoint, on any number of ranks.

    Args:
        model: wrapped; the hook is registered on it.
        names: its parameters' names, by the parameters' ids.
        rank: rank of the matrices that are exchanged.
        start_step: the run's first compressed step.
    """

    def __init__(self, model: DistributedDataParallel, names: Mapping[int, str], *, rank: int, start_step: int) -> None:
        self._names = names
        self._rank = rank
        self._start_step = start_step
        self._step = 0
        self._whole = True
        self._carried: dict[str, Tensor] = {}
        self._buckets: dict[int, list[Tensor]] = {}
        self._inner = self._fresh()
        model.register_comm_hook(None, self._hook)

    def _hook(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        parameters, is_last = bucket.parameters(), bucket.is_last()
        if self._whole or self._step < self._start_step:
            for parameter, memory in zip(parameters, bucket.gradients(), strict=True):
                name = self._names[id(parameter)]
                if name in self._carried:
                    _in_shape(memory, parameter).add_(self._carried[name])
            done = default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None: all ranks
            if is_last:
                self._carried, self._whole, self._inner = {}, False, self._fresh()
        else:
            self._buckets[bucket.index()] = parameters
            done = powersgd.powerSGD_hook(self._inner, bucket)
        self._step += is_last
        return done

    @torch.no_grad()
    def carried(self) -> dict[str, Tensor]:
        """The accumulated compression error by parameter, averaged over the ranks.

        All ranks call this together. The next step is exchanged uncompressed, with these values.
        """
        for index, flat in self._inner.error_dict.items():
            parameters = self._buckets[index]
            sizes = [parameter.numel() for parameter in parameters]
            for parameter, memory in zip(parameters, flat.split(sizes), strict=True):
                # Contiguous for the exchange between ranks.
                error = _in_shape(memory, parameter).clone(memory_format=torch.contiguous_format)
                self._carried[self._names[id(parameter)]] = error
        self._inner.error_dict.clear()
        for name in sorted(self._carried):
            dist.all_reduce(self._carried[name])
            self._carried[name].div_(dist.get_world_size())
        self._whole = True
        return dict(self._carried)

    def load(self, carried: Mapping[str, Tensor], step: int) -> None:
        """Resume after `step` steps with what another process's `carried` returned."""
        self._carried = dict(carried)
        self._whole, self._step = True, step

    def _fresh(self) -> powersgd.PowerSGDState:
        state = powersgd.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=self._rank,
            # The hook's own step count starts from scratch here; the run's is in this class.
            start_powerSGD_iter=2,
            orthogonalization_epsilon=1e-8,
            # The initial matrices are random, and the same on all ranks.
            random_seed=counter_seed(self._step) % 2**32,
        )
        state.iter = state.start_powerSGD_iter
        return state


def _in_shape(memory: Tensor, parameter: Tensor) -> Tensor:
    """A view of a gradient's part of a bucket in the parameter's logical order.

    A bucket holds them in memory order, which differs under channels_last.
    """
    return memory.as_strided(parameter.shape, parameter.stride())
