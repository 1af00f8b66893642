"""Faster ways to run a torch model on a CPU: it is traced once, and then runs without the calls of its modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, Literal, get_args

import torch
from torch import fx, nn
from torch.nn import functional as F

from penstock.errors import ConfigError

#: How a worker runs the model: it calls the module, or torch's functions one after the other, or numpy's.
Inference = Literal["torch", "traced", "numpy"]
INFERENCE: tuple[str, ...] = get_args(Inference)


def refusal(inference: str, what: str, why: str, instead: str = '"torch"') -> ConfigError:
    """The error for a model that `inference` cannot run. `what` names the layer."""
    return ConfigError(f'inference="{inference}" cannot run {what}: {why}. Use inference={instead} for this model')


def _layer(path: str, module: nn.Module) -> str:
    return f"layer {path!r}, a {type(module).__name__}" if path else f"the model, a {type(module).__name__}"


# ---- tracing -----------------------------------------------------------------------------------

#: What the call of a layer becomes, by the layer's type: a function, its arguments after the input (among them the
#: layer's weights), and its keyword arguments. None: the layer returns its input.
_FUNCTIONS: dict[
    type[nn.Module], Callable[[Any], tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None]
] = {
    nn.Linear: lambda layer: (F.linear, (layer.weight, layer.bias), {}),
    nn.Tanh: lambda layer: (torch.tanh, (), {}),
    nn.ReLU: lambda layer: (torch.relu, (), {}),
    nn.Sigmoid: lambda layer: (torch.sigmoid, (), {}),
    nn.ELU: lambda layer: (F.elu, (layer.alpha,), {}),
    nn.GELU: lambda layer: (F.gelu, (), {"approximate": layer.approximate}),
    nn.LayerNorm: lambda layer: (
        F.layer_norm,
        (tuple(layer.normalized_shape), layer.weight, layer.bias, layer.eps),
        {},
    ),
    nn.Flatten: lambda layer: (torch.flatten, (layer.start_dim, layer.end_dim), {}),
    nn.Identity: lambda layer: None,
    nn.Dropout: lambda layer: None,  # a copy that acts is in eval mode
}


class _Tracer(fx.Tracer):
    """Writes the layer of every node into `node.meta["layer"]`, and keeps the layer in which tracing failed."""

    failed: str | None = None

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or _layer(self.path_of_module(m), m)
            raise

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        path = self.scope.module_path
        node.meta["layer"] = _layer(path, self.root.get_submodule(path))
        return node


def trace(model: nn.Module, inference: str) -> tuple[fx.Graph, list[torch.Tensor]]:
    """The operations of `model`, which is in eval mode, as a graph, and the model's weights.

    The weights are the first inputs of the graph. The layers in `_FUNCTIONS` have become calls of functions.
    `node.meta["layer"]` says in which layer a node is. `inference` is for errors. Raises `ConfigError` with the name of
    the layer if the model cannot be traced.
    """
    for path, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            raise refusal(inference, _layer(path, module), "it has forward hooks, which would not be called")
    tracer = _Tracer()
    try:
        graph = tracer.trace(model)
    except Exception as error:  # the user's code may raise anything for a value that is not known yet
        why = f"tracing its forward raised {type(error).__name__}: {error}"
        raise refusal(inference, tracer.failed or _layer("", model), why) from error
    return graph, _expose_weights(graph, model)


def _expose_weights(graph: fx.Graph, model: nn.Module) -> list[torch.Tensor]:
    """Turn the weights into inputs of the graph, before its own inputs. Returns the weights."""
    weights: dict[torch.Tensor, fx.Node] = {}
    first = next(iter(graph.nodes))

    def with_weights(value: object) -> Any:
        """If `value` is a weight, the input of the graph that stands for it; otherwise `value`."""
        if not isinstance(value, torch.Tensor):
            return value
        if value not in weights:
            with graph.inserting_before(first):
                weights[value] = graph.placeholder(f"weight_{len(weights)}")
        return weights[value]

    for node in list(graph.nodes):
        if node.op == "get_attr":
            node.replace_all_uses_with(with_weights(attrgetter(str(node.target))(model)))
            graph.erase_node(node)
        elif node.op == "call_module":
            _inline(graph, node, model.get_submodule(str(node.target)), with_weights)
    return list(weights)


def _inline(graph: fx.Graph, node: fx.Node, layer: nn.Module, with_weights: Callable[[Any], Any]) -> None:
    """Replace the call of a layer by the call of a function, if `_FUNCTIONS` has the layer's type."""
    node.meta["layer"] = _layer(str(node.target), layer)
    if type(layer) not in _FUNCTIONS or len(node.args) != 1 or node.kwargs:
        return
    call = _FUNCTIONS[type(layer)](layer)
    replacement: Any = node.args[0]
    if call is not None:
        function, arguments, keywords = call
        with graph.inserting_before(node):
            arguments = (replacement, *map(with_weights, arguments))
            replacement = graph.call_function(function, arguments, keywords)
        replacement.meta["layer"] = node.meta["layer"]
    node.replace_all_uses_with(replacement)
    graph.erase_node(node)


class TracedModel:
    """Calls torch's functions one after the other. Changes of the weights of `model` take effect: nothing is copied.

    A call takes and returns what `model` does. With a small MLP a whole step is 1.07 to 1.3 times as fast as with
    "torch", also with layers that numpy does not have: `python benchmarks/inference.py --layers`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        graph, weights = trace(model, "traced")
        module = fx.GraphModule(model, graph)
        self._run = partial(type(module).forward, module, *weights)  # without the checks of `nn.Module.__call__`

    def __call__(self, *inputs: Any) -> Any:
        return self._run(*inputs)

    def __reduce__(self) -> tuple[Any, ...]:
        return TracedModel, (self._model,)
