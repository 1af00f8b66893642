"""From `env_fn` to one factory per environment, and the errors for a wrong `env_fn`."""

from __future__ import annotations

import pickle
import sys
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces import Box, Discrete
from hypothesis import given
from hypothesis import strategies as st

from penstock.columns.builder import EnvBuilder
from penstock.envs import CountingEnv, EnvFactory, ScriptedGame, build_example_env, env_factories
from penstock.envs.factory import EnvContext
from penstock.envs.seeding import Purpose
from penstock.errors import ConfigError, SpaceError
from penstock.vector import ShmVectorEnv
from penstock.workers.control import ControlBlock


def lengths(factories: tuple[EnvFactory, ...]) -> list[int]:
    return [factory().unwrapped.length for factory in factories]


# ---- env_factories -----------------------------------------------------------------------------


@given(st.integers(0, 6))
def test_one_callable_is_used_for_all_environments(n: int) -> None:
    factories = env_factories(partial(CountingEnv, length=3), None, n)
    envs = [factory() for factory in factories]
    assert [env.unwrapped.length for env in envs] == [3] * n
    assert len(set(map(id, envs))) == n


@given(st.lists(st.integers(1, 100), max_size=6))
def test_a_list_of_callables_or_of_kwargs_gives_each_environment_its_own(wanted: list[int]) -> None:
    assert lengths(env_factories([partial(CountingEnv, length=n) for n in wanted], None, len(wanted))) == wanted
    assert lengths(env_factories(CountingEnv, [{"length": n} for n in wanted], len(wanted))) == wanted


def test_kwargs_are_for_all_environments_and_later_changes_have_no_effect() -> None:
    kwargs = {"length": 9}
    factories = env_factories(CountingEnv, kwargs, 2), env_factories(CountingEnv, [kwargs], 1)
    kwargs["length"] = 1
    assert [lengths(each) for each in factories] == [[9, 9], [9]]


def test_an_id_is_made_with_the_kwargs() -> None:
    (factory,) = env_factories("CartPole-v1", {"max_episode_steps": 7}, 1)
    env = factory()
    assert env.spec.id == "CartPole-v1"
    assert env.spec.max_episode_steps == 7
    env.close()


def test_an_id_that_only_this_process_knows_can_be_pickled() -> None:
    gym.register("OnlyHere-v0", entry_point=CountingEnv, kwargs={"length": 4})
    try:
        pickled = cloudpickle.dumps(env_factories("OnlyHere-v0", None, 1))
    finally:
        del gym.registry["OnlyHere-v0"]
    (factory,) = pickle.loads(pickled)
    assert factory().unwrapped.length == 4


REGISTERS = """
import gymnasium as gym
gym.register("OfModule-v0", entry_point="penstock.envs:CountingEnv", kwargs={"length": 4})
"""


def test_an_id_with_the_module_that_registers_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `gym.make` takes it."""
    (tmp_path / "of_module.py").write_text(REGISTERS)
    (tmp_path / "of_fault.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with ShmVectorEnv(["of_module:OfModule-v0"] * 2) as envs:
            assert envs.apply(lambda env: env.unwrapped.length) == (4, 4)
        (factory,) = env_factories("of_module:OfModule-v0", {"length": 6}, 1)
        assert factory().unwrapped.length == gym.make("of_module:OfModule-v0", length=6).unwrapped.length == 6
        with pytest.raises(ConfigError, match=r"'of_module:Other-v0' is not a registered environment id: .*Other"):
            env_factories("of_module:Other-v0", None, 1)
        with pytest.raises(ConfigError, match="id: the import of of_fault raised ZeroDivisionError"):
            env_factories("of_fault:OfModule-v0", None, 1)
    finally:
        del gym.registry["OfModule-v0"]
        sys.modules.pop("of_module")


@pytest.mark.parametrize(
    "env_id", ["NoSuchEnvironment-v0", "CartPole-v99", "not an id", "", "no/such_game_v0", "no_module:E-v0"]
)
def test_an_unknown_id_is_named(env_id: str) -> None:
    with pytest.raises(ConfigError, match=f"env_fn={env_id!r} is not a registered environment id"):
        env_factories(env_id, None, 1)


@pytest.mark.parametrize("env_fn", [None, 5, ["CartPole-v1"], [CountingEnv, None], {"a": 1}, CountingEnv(), [0] * 9999])
def test_the_error_for_a_wrong_env_fn_shows_an_example_and_is_short(env_fn: Any) -> None:
    with pytest.raises(ConfigError, match=r"eval_env_fn must be a callable.*, got .*functools.partial") as caught:
        env_factories(env_fn, None, 2, "eval_")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("env_fn", "env_kwargs", "message"),
    [
        ([CountingEnv] * 3, None, "env_fn is a list of 3 callables for 2 environments"),
        (CountingEnv, [{}], "env_kwargs is a list of 1 dicts for 2 environments"),
        (CountingEnv, 5, "env_kwargs"),
        (CountingEnv, [1, 2], "env_kwargs"),
        (CountingEnv, "ab", "env_kwargs"),
        (CountingEnv, {3: 4}, r"env_kwargs must be a dict of arguments by name, .* got dict \{3: 4\}"),
        (CountingEnv, [{}, {3: 4}], "env_kwargs must be a dict of arguments by name"),
    ],
)
def test_wrong_lists_and_kwargs_are_named_with_both_numbers(env_fn: Any, env_kwargs: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        env_factories(env_fn, env_kwargs, 2)


# ---- building ----------------------------------------------------------------------------------


class Old:
    def step(self, action: Any) -> None: ...


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (dict, r"builtins\.dict$"),
        (Old, ".*Old: .*shimmy"),
        (lambda: None, r"builtins\.NoneType: did you forget `return`\?$"),
    ],
)
def test_what_is_not_a_gymnasium_env_is_named_with_advice(make: Any, got: str) -> None:
    for build in (EnvFactory.__call__, build_example_env):
        with pytest.raises(ConfigError, match=rf"^the environment function must return a gymnasium\.Env, got {got}"):
            build(EnvFactory(make))


def raising(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
        (AssertionError(), "AssertionError"),
        (AssertionError("\n"), "AssertionError"),
    ],
)
def test_an_exception_of_a_factory_is_named_and_is_the_cause(error: Exception, shown: str) -> None:
    message = f"main process could not build an example environment and read its spaces: {shown}$"
    with pytest.raises(ConfigError, match=message) as caught:
        build_example_env(EnvFactory(raising, {"error": error}))
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("build", [EnvFactory.__call__, lambda factory, context: factory.batched(2, context)])
def test_an_id_that_only_the_main_process_knows_gets_a_hint(build: Any) -> None:
    factory = EnvFactory(lambda num_envs=1: gym.make("OnlyThere-v0"))
    with pytest.raises(gym.error.NameNotFound):
        build(factory, EnvContext(0, -1, 0, None))
    with pytest.raises(ConfigError, match=r"OnlyThere.* not in a worker: .*register it, inside env_fn") as caught:
        build(factory, EnvContext(0, 1, 0, None))
    assert isinstance(caught.value.__cause__, gym.error.NameNotFound)


def test_a_wrong_keyword_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match="unexpected keyword argument 'lenght'"):
        build_example_env(EnvFactory(CountingEnv, {"lenght": 3}))


@pytest.mark.parametrize("env_id", ["ALE/NoSuchGame-v5", "NoSuchNoFrameskip-v4"])
def test_an_unknown_atari_game_names_the_import(env_id: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a registered environment id: .*with `import ale_py`$"):
        env_factories(env_id, None, 1)
    with pytest.raises(ConfigError, match=r"could not build an example .*with `import ale_py`$") as caught:
        build_example_env(env_factories(lambda: gym.make(env_id), None, 1)[0])
    assert isinstance(caught.value.__cause__, gym.error.UnregisteredEnv)


# ---- the context -------------------------------------------------------------------------------


class Weather(CountingEnv):
    def __init__(self, context: Any = "sunny") -> None:
        super().__init__()
        self.context = context


def of_any(context: Any = None) -> Any:
    return Weather(context)


def of_must(context: Any) -> Any:
    return Weather(context)


def of_annotated(*, context: EnvContext | str = "sunny") -> Any:
    return Weather(context)


@pytest.mark.parametrize(
    ("env_fn", "env_kwargs", "wanted"),
    [
        (Weather, {"context": "rain"}, "rain"),
        (partial(Weather, context="rain"), None, "rain"),
        (partial(of_any, context=None), None, None),
        (partial(of_annotated, context="rain"), None, "rain"),
        (of_any, {"context": None}, None),
        (of_must, {"context": "rain"}, "rain"),
        (partial(Weather, "rain"), None, "rain"),
        (Weather, None, "sunny"),
        (of_any, None, EnvContext),
        (of_must, None, EnvContext),
        (of_annotated, None, EnvContext),
    ],
)
def test_an_own_argument_named_context_stays(env_fn: Any, env_kwargs: Any, wanted: Any) -> None:
    for factory in (env_factories(env_fn, env_kwargs, 2)[1], EnvFactory(env_fn, env_kwargs or {})):
        found = factory().context
        assert type(found) is EnvContext if wanted is EnvContext else found == wanted


@pytest.mark.skipif(sys.version_info < (3, 14), reason="older versions evaluate annotations earlier")
def test_a_context_is_given_beside_annotations_that_only_type_checkers_know() -> None:
    source = (
        "def make(level: Config.level = 3, *, context: EnvContext | str = 'sunny') -> Config: return Weather(context)"
    )
    module: dict[str, Any] = {"EnvContext": EnvContext, "Weather": Weather}
    exec(source, module)
    (factory,) = env_factories(module["make"], None, 1)
    assert type(factory().context) is EnvContext


class Spaceless(CountingEnv):
    """An environment without the space `missing`; records whether it was closed."""

    closed = False

    def __init__(self, missing: str, value: Any) -> None:
        super().__init__()
        if value is None:
            delattr(self, missing)
        else:
            setattr(self, missing, value)

    def close(self) -> None:
        Spaceless.closed = True


@pytest.mark.parametrize("missing", ["observation_space", "action_space"])
@pytest.mark.parametrize("value", [None, (3,), spaces.Discrete], ids=repr)
def test_an_environment_without_a_space_is_refused_with_the_spaces_name_and_closed(missing: str, value: Any) -> None:
    Spaceless.closed = False
    with pytest.raises(ConfigError, match=f"the environment's {missing} must be a gymnasium space, got"):
        build_example_env(EnvFactory(Spaceless, {"missing": missing, "value": value}))
    assert Spaceless.closed


class Turns(ScriptedGame):
    """As PettingZoo's AECEnv, for what penstock sees of it."""

    def agent_iter(self) -> Any:
        raise AssertionError("nothing plays it")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (ScriptedGame, "Environments of several agents are for samplers and for ShmVectorEnv"),
        (Turns, "played in turns .* give a ParallelEnv"),
        (lambda: gym.make_vec("CartPole-v1", 2), "a ShmVectorEnv with num_envs=n"),
    ],
)
def test_environments_of_other_kinds_get_the_right_advice(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        build_example_env(env_factories(make, None, 1)[0])
    assert "shimmy" not in str(error.value)


# ---- every environment must have the spaces of the example environment --------------------------

BOX = Box(-1.0, np.array([1.0, np.inf], np.float32))
CONTEXT = EnvContext(env_rank=3, worker_rank=0, seed=0, purpose=Purpose.TRAIN)


class Spaced(gym.Env[Any, Any]):
    action_space = Discrete(2)

    def __init__(self, observation_space: gym.Space[Any]) -> None:
        self.observation_space = observation_space


@pytest.mark.parametrize(
    "other",
    [
        Box(-1.0, np.array([1.0, np.inf], np.float32)),
        Box(-1.0, np.array([1.0 + 1e-7, np.inf], np.float32)),  # Gymnasium compares bounds with a tolerance
        Box(-1.0, np.array([1.0, 9.0], np.float32)),
        Box(-2.0, np.array([1.0, np.inf], np.float32)),
        Box(-1.0, np.array([1.0, np.inf], np.float64), dtype=np.float64),
        Box(-1.0, np.array([1.0, np.inf, np.inf], np.float32)),
        Discrete(2),
    ],
)
def test_a_space_is_refused_where_gymnasium_says_that_it_differs(other: gym.Space[Any]) -> None:
    builder = EnvBuilder(ControlBlock(1, 1, shared=False).progress(0), BOX, Discrete(2))
    factory = EnvFactory(Spaced, {"observation_space": other})
    if other == BOX:
        assert builder.build(factory, CONTEXT).observation_space is other
    else:
        with pytest.raises(SpaceError, match=r"the observation_space of env_rank 3 is .*must have the same spaces"):
            builder.build(factory, CONTEXT)
    builder.close()
