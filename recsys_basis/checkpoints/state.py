"""The tensors of a run under their names, aliasing live memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from recsys_basis.training.build import Trainable

DENSE = "dense_optimizer/"


def state_of(trainable: Trainable) -> dict[str, Any]:
    """Everything to save; the generators' states are copies."""
    state = tensors_in_place(trainable)
    names = _dense_names(trainable)
    for index, entries in trainable.dense_optimizer.state_dict()["state"].items():
        state |= {f"{DENSE}{names[index]}/{key}": value for key, value in entries.items()}
    return state | _generators(_device(trainable))


def tensors_in_place(trainable: Trainable) -> dict[str, Any]:
    """What exists before the first step, so that loading can fill it."""
    state: dict[str, Any] = {f"model/{key}": value for key, value in trainable.model.state_dict().items()}
    for entries in trainable.row_optimizer.state_dict()["state"].values():
        state |= {f"row_optimizer/{key}": value for key, value in entries.items()}
    if trainable.tower_average is not None:
        state |= {f"tower_average/{name}": value for name, value in trainable.tower_average.state.items()}
    return state


def tensors_to_set(
    trainable: Trainable, saved: Mapping[str, TensorStorageMetadata]
) -> dict[str, torch.Tensor]:
    """Empty tensors for the rest of a checkpoint of ``saved``, which ``set_tensors`` takes when loaded.

    A fresh dense optimizer has no state yet. A generator is there if this rank's was saved.
    """
    generators = _generators(_device(trainable))
    return {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in saved.items()
        if key.startswith(DENSE) or key in generators
    }


def set_tensors(trainable: Trainable, loaded: Mapping[str, torch.Tensor]) -> None:
    """Hand dense state and generators to their owners."""
    indices = {name: index for index, name in _dense_names(trainable).items()}
    dense: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in loaded.items():
        if key.startswith(DENSE):
            parameter, name = key.removeprefix(DENSE).rsplit("/", 1)
            dense.setdefault(indices[parameter], {})[name] = value
        elif key.endswith("/cuda"):
            torch.cuda.set_rng_state(value, _device(trainable))
        else:
            torch.set_rng_state(value)
    groups = trainable.dense_optimizer.state_dict()["param_groups"]
    trainable.dense_optimizer.load_state_dict({"state": dense, "param_groups": groups})


def _device(trainable: Trainable) -> torch.device:
    return trainable.dense_parameters()[0].device


def _generators(device: torch.device) -> dict[str, torch.Tensor]:
    """States of this rank's generators. Nothing of this package draws while it trains; a user's rule may."""
    states = {f"rng/{dist.get_rank()}/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"rng/{dist.get_rank()}/cuda"] = torch.cuda.get_rng_state(device)
    return states


def _dense_names(trainable: Trainable) -> dict[int, str]:
    """Parameter name of each index in the dense optimizer's state_dict, which counts group by group."""
    return {
        index: name
        for group in trainable.dense_optimizer.state_dict()["param_groups"]
        for index, name in zip(group["params"], group["param_names"], strict=True)
    }
