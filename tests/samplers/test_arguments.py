"""Arguments of samplers: misspelt ones fail in the type checker and at run time, and some do not go together."""

from __future__ import annotations

import inspect
import pydoc
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import Any, get_origin

import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv as CartPole
from torch import nn
from typing_extensions import Required, get_type_hints

from penstock import (
    Affinity,
    AlternatingSampler,
    AsyncSampler,
    CategoricalPgAgent,
    ConfigError,
    FunctionAgent,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    RecurrentCategoricalPgAgent,
    ResetCollector,
    Sampler,
    SerialSampler,
    TrajInfo,
    WaitResetCollector,
)
from penstock.collectors import EvalCollector
from penstock.envs import CountingEnv, EnvFn, ScriptedGame
from penstock.evaluation import evaluate
from penstock.samplers.config import SamplerConfig, SamplerOptions
from penstock.samplers.refusals import NAMES, TABLE, as_table, refuse
from penstock.workers.affinity import usable_cpus

from .started import check_refused, started

SAMPLERS = [SerialSampler, ParallelSampler, GpuSampler, AlternatingSampler]
every = pytest.mark.parametrize("cls", SAMPLERS)


#: What the message says after the name of an argument that no sampler has.
HINTS = {
    "batch_t": r": did you mean 'batch_T'\?$",
    "num_workers": r": did you mean 'n_workers'\?$",
    "n_steps": r": did you mean 'batch_T'\?$",
    "num_envs": r": did you mean 'batch_B'\?$",
    "colector_cls": r": did you mean 'collector_cls'\?$",
    "EnvCls": r": did you mean 'env_fn'\?$",  # the name that rlpyt has
    "options": r": Gymnasium's reset options .*a wrapper.*sampler\.call",
    "reset_options": r": Gymnasium's reset options .*a wrapper.*sampler\.call",
    "nosuch": r"; it has (\w+, ){2}\w+ and \d\d others: see help\(\w+\)$",
}
UNKNOWN = [
    *((cls, name, hint) for cls in SAMPLERS for name, hint in HINTS.items()),
    (GpuSampler, "min_redy", ": did you mean 'min_ready'"),
    (AlternatingSampler, "overlp", ": did you mean 'overlap'"),
    *(
        (SerialSampler, name, ": .*Sampler ha(s|ve) it$")
        for name in ("min_ready", "server", "overlap", "lag", "replay", "n_shards")
    ),
]


@pytest.mark.parametrize(("cls", "name", "hint"), UNKNOWN)
def test_an_unknown_argument_is_named_with_what_may_be_meant(cls: Any, name: str, hint: str) -> None:
    env_fn = [] if name == "EnvCls" else [CountingEnv]
    with pytest.raises(ConfigError, match=rf"^{cls.__name__} has no argument '{name}'{hint}"):
        cls(*env_fn, **{"batch_T": 1, "batch_B": 2, name: 3})


@every
def test_missing_arguments_are_named(cls: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{cls.__name__} needs batch_T and batch_B$"):
        cls(CountingEnv)
    assert next(iter(inspect.signature(cls).parameters)) == "env_fn"


@pytest.mark.parametrize(
    ("names", "value", "message"),
    [
        (
            ("collector_cls", "eval_collector_cls", "traj_info_cls"),
            TrajInfo(),
            r"a subclass of \w+ \(the class itself\), ",
        ),
        (("n_slots",), 10**9, "at most 10,000, got 1000000000"),
        (("eval_env_kwargs",), 0, "a dict, a list of dicts or None, got 0$"),
        *(
            (("debug", "check_finite", "record_final_obs", "flatten_wrappers"), value, "True or False, got ")
            for value in (1, None, "x", [])
        ),
    ],
)
def test_wrong_values_are_named(names: Any, value: Any, message: str) -> None:
    for name in names:
        with pytest.raises(ConfigError, match=rf"^{name} must be {message}"):
            ParallelSampler(CountingEnv, **{"batch_T": 1, "batch_B": 2, name: value})


class Mine(ParallelSampler):
    """A user's own, with the arguments of every sampler."""


@pytest.mark.parametrize("cls", [Sampler, *SAMPLERS, AsyncSampler, Mine])
def test_help_and_completion_list_every_option_with_its_default(cls: Any) -> None:
    wanted = {
        field.name: inspect.Parameter.empty if field.default is MISSING else field.default
        for field in fields(SamplerConfig)
    }
    if cls is AsyncSampler:
        wanted["n_slots"] = 3
    for shown in (inspect.signature(cls), inspect.signature(cls.__init__)):
        found = shown.parameters
        assert {name: found[name].default for name in wanted} == wanted
        assert [each.kind for each in found.values() if each.name not in ("self", "env_fn")] == [
            inspect.Parameter.KEYWORD_ONLY
        ] * (len(found) - 1 - ("self" in found))
    assert "options" not in inspect.signature(cls).parameters
    assert ("min_ready" in inspect.signature(cls).parameters) == (cls in (GpuSampler, AsyncSampler))
    assert "batch_T: 'int'" in pydoc.render_doc(cls, renderer=pydoc.plaintext).split("Methods", 1)[0]


def test_a_subclass_with_arguments_of_its_own_shows_these() -> None:
    class Own(SerialSampler):
        def __init__(self, size: int, **rest: Any) -> None:
            super().__init__(CountingEnv, batch_T=size, batch_B=size, **rest)

    assert list(inspect.signature(Own).parameters) == ["size", "rest"]
    assert Own(3).batch_T == 3


class Unreadable:
    """A callable of which nobody can say what it takes. Python 3.14 evaluates annotations to say it, and so raises
    NameError for a name that only type checkers import."""

    def __init__(self, called: Any) -> None:
        self.called = called

    @property
    def __signature__(self) -> Any:
        raise NameError("name 'Config' is not defined")

    def __call__(self, *inputs: Any, **more: Any) -> Any:
        return self.called(*inputs, **more)


class Hidden(nn.Module):
    """A model of one input, or a recurrent one, with such a `forward`."""

    state_shape = (2,)

    def __init__(self) -> None:
        super().__init__()
        self.forward = Unreadable(self.outputs)

    def outputs(self, observation: torch.Tensor, *others: torch.Tensor) -> Any:
        return torch.zeros(len(observation), 2), torch.zeros(len(observation)), *others[2:]


def first(observation: Any) -> Any:
    return np.zeros(len(observation), np.int64)


@pytest.mark.parametrize(
    ("env_fn", "agent", "more"),
    [
        (CountingEnv, lambda: FunctionAgent(Unreadable(first)), {}),
        (CartPole, lambda: CategoricalPgAgent(Unreadable(Hidden)), {"bootstrap_value": True}),
        (CartPole, lambda: RecurrentCategoricalPgAgent(Hidden()), {"bootstrap_value": True}),
        (partial(ScriptedGame, 2), lambda: {"one": RandomAgent()}, {"policy_of": Unreadable(lambda agent: "one")}),
    ],
    ids=["function", "model", "recurrent", "policies"],
)
def test_functions_with_annotations_that_cannot_be_evaluated_are_called_as_others(
    env_fn: Any, agent: Any, more: Any
) -> None:
    with started(Unreadable(env_fn), agent(), **more) as sampler:
        sampler.obtain_samples(0)


def test_so_are_such_policies_of_an_evaluation() -> None:
    assert len(evaluate(Unreadable(first), Unreadable(CartPole), episodes=2, n_workers=1).episodes) == 2


@pytest.mark.parametrize("cls", [ResetCollector, WaitResetCollector, EvalCollector])
def test_a_collector_is_given_as_a_class(cls: Any) -> None:
    with pytest.raises(ConfigError, match=f"each worker makes its own {cls.__name__}: give .* the class itself"):
        cls()


def test_flags_of_initialize_may_be_those_of_numpy() -> None:
    check_refused(CountingEnv, r"^bootstrap_value must be True or False, got 'x'$", bootstrap_value="x")
    with started(CountingEnv, bootstrap_value=np.False_):
        pass


def test_type_checkers_and_run_time_know_the_same_names_and_types() -> None:
    names = {"Required": Required}
    known, table = get_type_hints(SamplerOptions, localns=names), get_type_hints(SamplerConfig)
    assert table.pop("env_fn") == EnvFn
    assert known == table
    shown = get_type_hints(SamplerOptions, localns=names, include_extras=True)
    required = {name for name, annotation in shown.items() if get_origin(annotation) is Required}
    assert {"env_fn", *required} == {field.name for field in fields(SamplerConfig) if field.default is MISSING}


@every
@pytest.mark.parametrize(
    ("affinity", "message"),
    [
        pytest.param([9999, 9999], "pins worker 0 to CPUs", marks=pytest.mark.linux("masks of CPUs")),
        (["a", "b"], "must list, for each worker"),
        (3, "must list, for each"),
    ],
)
def test_an_affinity_that_cannot_work_is_refused(cls: type[Sampler], affinity: Any, message: str) -> None:
    check_refused(CountingEnv, message, cls=cls, n_workers=2, affinity=affinity)


@pytest.mark.filterwarnings("ignore:affinity has no effect:RuntimeWarning")  # where nothing can be pinned
def test_a_serial_sampler_takes_the_affinity_of_other_samplers() -> None:
    cpu = min(usable_cpus(), default=0)
    for affinity in ([cpu, cpu], Affinity(cpus=[[cpu]] * 3), Affinity(pin=False)):
        with started(CountingEnv, n_workers=2, affinity=affinity) as sampler:
            assert sampler.stats().workers[0].cpus == ()


# ---- what does not go together -------------------------------------------------------------

PAIRS = [(row, feature, other) for row in TABLE for feature in row.features for other in row.others]


def test_the_documentation_has_the_table_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "samplers.md").read_text()
    section = page.partition("## What does not go together\n")[2].partition("\n## ")[0]
    table = [line for line in section.splitlines(keepends=True) if line.startswith("|")]
    assert "".join(table) == as_table()
    assert len(TABLE) <= 10


@pytest.mark.parametrize(("row", "feature", "other"), PAIRS)
def test_each_pair_is_refused_with_its_reason(row: Any, feature: str, other: str) -> None:
    asked: dict[str, object] = dict.fromkeys(NAMES, False)
    refuse({**asked, feature: True})
    refuse({**asked, other: True})
    with pytest.raises(ConfigError) as told:
        refuse({**asked, feature: True, other: True})
    assert str(told.value) == f"{feature} and {other} do not go together: {row.reason}. {row.instead}"


def test_a_name_that_is_not_in_the_table_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="a misspelt name"):
        refuse({"a misspelt name": True})
