"""Recorded calls: nothing of a step stays once its calls were taken."""

import gc
import weakref

import torch

from lrmoe import LRMoEConfig
from lrmoe.experiments.trajectories.recorder import Recorder
from lrmoe.layer import MoELayer


def test_a_taken_call_lets_go_of_its_graph() -> None:
    torch.manual_seed(0)
    layer = MoELayer(
        num_experts=4, hidden_size=8, intermediate_size=4, config=LRMoEConfig(max_drop=0.0), layer=0
    )
    gate_up, down = (torch.randn(shape, requires_grad=True) for shape in ((4, 8, 8), (4, 8, 4)))
    leaf = torch.randn(6, 8, requires_grad=True)
    ids, alpha = torch.randint(4, (6, 2)), torch.rand(6, 2)
    recorder = Recorder()
    below = leaf * 2  # stands for the model below, which the layer's input hangs on
    gone = weakref.ref(below)
    recorder(layer, below, ids, alpha, gate_up, down, training=True).sum().backward()
    (call,) = recorder.take()
    assert call.upstream.shape == call.output.shape == (6, 8)
    assert call.gradients["x"] is not None
    del below, call
    gc.collect()
    assert gone() is None
