"""ShmVectorEnv over batched environments: for any number of workers what one batched environment gives."""

from __future__ import annotations

import os
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from penstock import ConfigError, EnvCallError, SamplerStateError, SpaceError, WorkerError
from penstock.envs import BatchedCartPole, BatchedEnvPool, CountingEnv
from penstock.testing import Fault, faulty_env
from penstock.vector import ShmVectorEnv

from ..scale import scaled
from ..support import assert_same, until
from .vector_support import MODES, Pictured, Waiting, compare, counting, let_go, modes, synced, talkative

#: Daily, workers with EnvPool or ALE are forks, which need not import it.
METHOD = scaled("forkserver", "fork")
SAME, DISABLED = AutoresetMode.SAME_STEP, AutoresetMode.DISABLED


def plain_parts(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """What an environment has returned, with float64 rewards, and of `final_obs` only the rows that count."""
    *parts, infos = result
    if len(parts) == 4:
        parts[1] = np.asarray(parts[1], np.float64)
        done = parts[2] | parts[3]
        infos = {key: value for key, value in infos.items() if key not in ("_final_obs", "_final_info", "final_info")}
        if "final_obs" in infos:
            infos["final_obs"] = [infos["final_obs"][b] for b in np.flatnonzero(done)]
    return (*parts, infos)


@pytest.mark.slow
@modes
def test_the_same_for_any_number_of_workers(mode: AutoresetMode) -> None:
    env_fn = partial(synced, talkative(spaces.Box(-1, 1, (3,), np.float64), spaces.Discrete(3, start=-1)), mode=mode)
    for n_workers in scaled((1, 2, 3), (3 - MODES.index(mode),)):  # daily, each mode with another number
        with ShmVectorEnv(env_fn, num_envs=5, n_workers=n_workers, autoreset_mode=mode) as ours:
            assert len(ours.worker_pids) == n_workers
            assert compare(ours, env_fn(num_envs=5), 40) > 20


def cartpole(num_envs: int) -> Any:
    return gym.make_vec("CartPole-v1", num_envs, "vector_entry_point", max_episode_steps=20)


@pytest.mark.slow
@pytest.mark.parametrize("given_as", [cartpole, "CartPole-v1"])
def test_an_environment_with_one_random_stream_gets_the_seed_of_its_first_row(given_as: Any) -> None:
    ours = ShmVectorEnv(given_as, num_envs=5, n_workers=2)
    assert ours.autoreset_mode is AutoresetMode.NEXT_STEP
    first, second = cartpole(3), cartpole(2)
    found = ours.reset(seed=5)[0]
    np.testing.assert_array_equal(found, np.concatenate([first.reset(seed=5)[0], second.reset(seed=8)[0]]))
    for t in range(18):  # before the first time limit of `cartpole`
        action = np.array([0, 1, t % 2, 1, 0])
        ours_, *theirs = ours.step(action), first.step(action[:3]), second.step(action[3:])
        for got, *wanted in zip(ours_[:4], *(each[:4] for each in theirs), strict=True):
            np.testing.assert_array_equal(got, np.concatenate(wanted))
    ours.close()


@pytest.fixture
def _envpool() -> None:
    """The first import of envpool keeps the frames that it came from, with all their variables."""
    pytest.importorskip("envpool")


@pytest.mark.usefixtures("_envpool")
@pytest.mark.slow
@pytest.mark.parametrize(("n_workers", "task"), [*scaled([(1, "CartPole-v1")], []), (3, "CartPole-v1"), (2, "Pong-v5")])
def test_envpool(n_workers: int, task: str) -> None:
    n, n_steps = scaled((4, 30), (3, 8)) if task == "Pong-v5" else (4, 30)  # an episode of Pong ends in 0.16 s
    pool = partial(BatchedEnvPool, task, max_episode_steps=7)
    with ShmVectorEnv(pool, num_envs=n, n_workers=n_workers, context=METHOD) as ours, closing(pool(n)) as theirs:
        assert compare(ours, theirs, n_steps, part=plain_parts) >= n * (n_steps // 7)


def pong(num_envs: int, mode: str) -> Any:
    from ale_py.vector_env import AtariVectorEnv

    small = {"img_height": 21, "img_width": 21, "num_threads": 1, "max_num_frames_per_episode": 28, "noop_max": 8}
    return AtariVectorEnv("pong", num_envs, autoreset_mode=mode, **small)


@pytest.mark.slow
@pytest.mark.parametrize(("n_workers", "mode"), [(2, "SameStep"), *scaled([(1, "SameStep"), (3, "NextStep")], [])])
def test_atari_also_with_seeds_for_some_rows(n_workers: int, mode: str) -> None:
    """Daily, real/test_vector_engines.py has the other mode."""
    pytest.importorskip("ale_py")
    ours = ShmVectorEnv(partial(pong, mode=mode), num_envs=3, n_workers=n_workers, context=METHOD)
    plain = pong(3, mode)
    ours.reset(seed=1)
    plain.reset(seed=np.arange(1, 4))
    # ALE takes seeds of the rows that are reset.
    mask = np.array([True, False, True])
    found, _ = ours.reset(seed=[7, 8, 9], options={"reset_mask": mask})
    wanted, _ = plain.reset(seed=np.array([7, 9]), options={"reset_mask": mask})
    np.testing.assert_array_equal(found, wanted)
    assert compare(ours, plain, scaled(40, 8), their_seed=np.arange(5, 8), part=plain_parts) >= 3
    ours.close()
    plain.close()


class Into(BatchedCartPole):
    """Counts its calls of `step_into`."""

    n_into = 0

    def step_into(self, out: Any, actions: Any) -> Any:
        self.n_into += 1
        return super().step_into(out, actions)


@pytest.mark.slow
def test_an_environment_may_write_in_place() -> None:
    env_fn: Any = partial(Into, max_episode_steps=9)
    with ShmVectorEnv(env_fn, num_envs=4, n_workers=2) as envs:
        assert compare(envs, env_fn(4), 20, part=plain_parts) >= 8
        assert envs.get_attr("n_into") == (20, 20)
    with ShmVectorEnv(env_fn, num_envs=4, n_workers=2, on_worker_failure="restart") as envs:
        envs.reset()
        envs.step(np.zeros(4, int))
        assert envs.get_attr("n_into") == (0, 0)  # the shared memory keeps the last observation during a step


@pytest.mark.slow
def test_entries_of_some_workers_have_a_mask() -> None:
    class Told(SyncVectorEnv):
        def step(self, actions: Any) -> Any:
            *parts, _ = super().step(actions)
            wide = np.full((self.num_envs, 2), "abc" * self.num_envs)
            return (*parts, {"wide": wide, "told": "once"} if self.num_envs > 1 else {})

    with ShmVectorEnv(lambda num_envs: Told([CountingEnv] * num_envs), num_envs=3, n_workers=2) as envs:
        envs.reset()
        infos = envs.step(np.zeros(3, int))[4]
    assert infos["wide"].tolist() == [["abcabc"] * 2] * 2 + [[""] * 2]
    assert infos["_wide"].tolist() == infos["_told"].tolist() == [True, True, False]
    assert infos["told"].tolist() == ["once", "once", ""]  # what is no array holds for each row of its worker


# ---- send, recv, masks, options -----------------------------------------------------------------


def test_a_slow_worker_keeps_the_others_not_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with ShmVectorEnv(partial(synced, partial(Waiting, tmp_path / "pipe")), num_envs=5, n_workers=2) as envs:
        envs.reset()
        envs.send([2, 0, 0, 0, 0])
        for t in range(1, 4):
            observation, reward, _, _, infos = envs.recv()
            assert infos["env_id"].tolist() == [3, 4]
            assert (reward.tolist(), observation[:, 1].tolist()) == ([t, t], [t, t])
            assert infos["count"].tolist() == [t, t]
            envs.send([0, 0], [4, 3])
        with pytest.raises(ConfigError, match=r"^send: one call steps environments \[3\] together with others"):
            envs.recv()
            envs.send([0], [4])
        with pytest.raises(SamplerStateError, match=r"reset: environments \[1, 2\] have not been received yet"):
            envs.reset(options={"reset_mask": np.array([True, False, False, False, False])})
        let_go(tmp_path / "pipe")
        assert envs.recv(min_ready=3)[4]["env_id"].tolist() == [0, 1, 2]
        observation, _ = envs.reset(options={"reset_mask": np.array([True, False, False, False, True])})
        assert observation[:, 1].tolist() == [0, 1, 1, 4, 0]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_some_rows_are_reset_with_options(mode: AutoresetMode) -> None:
    env_fn = partial(synced, talkative(spaces.Discrete(50), spaces.Discrete(2)), mode=mode)
    theirs = env_fn(num_envs=5)
    with ShmVectorEnv(env_fn, num_envs=5, n_workers=2) as ours:
        ours.reset(seed=3)
        theirs.reset(seed=3)
        for rows in ([1], [0, 3], [0, 1, 2], [0, 1, 2, 3, 4]):
            mask = np.isin(np.arange(5), rows)
            for seed in (None, 8):
                options = [{"level": 2, "reset_mask": mask.copy()} for _ in range(2)]
                assert_same(ours.reset(seed=seed, options=options[0]), theirs.reset(seed=seed, options=options[1]))
        with pytest.raises(ConfigError, match="options of batched environments must be None or one dict"):
            ours.reset(options=[{}, {}, {}, {}, {"level": 1}])
        ours.reset_async(seed=4)
        assert_same(ours.reset_wait(), theirs.reset(seed=4))
        ours.step_async(np.zeros(5, int))
        assert_same(ours.step_wait(timeout=30), theirs.step(np.zeros(5, int)))


@pytest.mark.slow
def test_an_environment_that_ignores_the_mask_is_refused() -> None:
    with ShmVectorEnv(BatchedCartPole, num_envs=4, n_workers=2) as envs:
        envs.reset(seed=0)
        envs.reset(options={"reset_mask": np.array([False, False, True, True])})  # all rows of a worker
        with pytest.raises(WorkerError, match="does not know the option reset_mask"):
            envs.reset(options={"reset_mask": np.array([True, False, False, False])})


@pytest.mark.slow
def test_rows_that_belong_together() -> None:
    def env_fn(num_envs: int) -> Any:
        assert num_envs % 3 == 0
        return synced(CountingEnv, num_envs)

    with ShmVectorEnv(env_fn, num_envs=9, n_workers=2, rows_per_env=3) as envs:
        assert envs.get_attr("num_envs") == (6, 3)
        assert envs.env_of_rows == [0] * 6 + [1] * 3


# ---- calls --------------------------------------------------------------------------------------


def test_calls_are_for_whole_batched_environments() -> None:
    def env_fn(num_envs: int) -> Any:
        return RecordEpisodeStatistics(BatchedCartPole(num_envs))

    with ShmVectorEnv(env_fn, num_envs=5, n_workers=2) as envs:
        envs.reset(seed=0)
        assert envs.get_attr("max_episode_steps") == (500, 500)
        envs.set_attr("length", [0.4, 0.6])
        assert envs.get_attr("length") == (0.4, 0.6)
        envs.broadcast({"length": 0.7}, [1])
        assert envs.call_some([1], "length") == (0.7,)
        assert envs.apply(lambda env: (type(env).__name__, env.num_envs)) == tuple(
            ("RecordEpisodeStatistics", n) for n in (3, 2)
        )
        with pytest.raises(EnvCallError, match=r"^call 'nothing' on env_rank 0 raised AttributeError"):
            envs.call("nothing")
        with pytest.raises(ConfigError, match=r"set_attr needs one value, or 2 of them"):
            envs.set_attr("length", [1.0] * 5)


@pytest.mark.slow
def test_pictures() -> None:
    with ShmVectorEnv(partial(synced, partial(Pictured, 7)), num_envs=3, n_workers=2) as envs:
        assert [frame.mean() for frame in envs.render() or ()] == [7, 7, 7]
        assert envs.render_tiled().shape == (8, 12, 3)


# ---- what is refused, and failures --------------------------------------------------------------


def test_parts_without_a_fixed_shape_are_refused() -> None:
    env_fn = partial(synced, talkative(spaces.Text(5), spaces.Discrete(2)))
    with pytest.raises(SpaceError, match="observation has a Text space"):
        ShmVectorEnv(env_fn, num_envs=2)


@pytest.mark.slow
def test_with_spaces_no_environment_is_built_in_the_main_process() -> None:
    def env_fn(num_envs: int, main: int = os.getpid()) -> Any:
        assert os.getpid() != main
        return synced(CountingEnv, num_envs, DISABLED)

    own = CountingEnv().observation_space, CountingEnv().action_space
    with ShmVectorEnv(env_fn, num_envs=2, spaces=own, autoreset_mode="DISABLED") as envs:
        envs.reset()
        assert envs.step(np.zeros(2, int))[1].tolist() == [1, 1]
        for _ in range(4):
            envs.step(np.zeros(2, int))
        with pytest.raises(SamplerStateError, match=r"environments \[0, 1\] have ended"):
            envs.step(np.zeros(2, int))
    with pytest.raises(WorkerError, match=r"has the autoreset mode DISABLED, that of .* is SAME_STEP"):
        ShmVectorEnv(env_fn, num_envs=2, spaces=own, autoreset_mode="SAME_STEP")


def with_fault(fault: Fault, mode: AutoresetMode) -> Any:
    """The last of three workers, which has two of six rows, has the fault."""

    def env_fn(num_envs: int, context: Any) -> Any:
        bad: Any = faulty_env(partial(CountingEnv, length=9), fault)
        fns = [partial(CountingEnv, length=9)] * num_envs
        return SyncVectorEnv([*fns[1:], bad if context.env_rank == 4 else fns[0]], autoreset_mode=mode)

    return env_fn


def test_an_exception_names_worker_and_rows() -> None:
    told = r"worker 2 \(pid \d+, env_rank 4 to 5\) raised .*InjectedFault(.|\n)*stepping env_rank 4"
    with ShmVectorEnv(with_fault(Fault("raise", at=2), SAME), num_envs=6, in_series=2) as envs:
        envs.reset()
        with pytest.raises(WorkerError, match=told):
            for _ in range(2):
                envs.step(np.zeros(6, int))


@pytest.mark.slow
@modes
@pytest.mark.parametrize("is_batched", [True, False])
def test_a_replaced_workers_episodes_are_cut_where_they_were(
    is_batched: bool, mode: AutoresetMode, tmp_path: Path
) -> None:
    fault, nothing = Fault("kill", at=3, marker=str(tmp_path / "marker")), np.zeros(6, int)
    env_fns: Any = [partial(CountingEnv, length=9)] * 5 + [faulty_env(partial(CountingEnv, length=9), fault)]
    own = {"env_fns": with_fault(fault, mode), "num_envs": 6} if is_batched else {"env_fns": env_fns}
    with ShmVectorEnv(**own, autoreset_mode=mode, in_series=2, on_worker_failure="restart") as envs:
        envs.reset(seed=1)
        for _ in range(2):
            envs.step(nothing)
        observation, reward, terminated, truncated, infos = envs.step(nothing)
        cut = [False] * 4 + [True] * 2
        assert envs.n_restarts == 1
        assert reward.tolist() == [3] * 4 + [0] * 2
        assert truncated.tolist() == cut
        assert not terminated.any()
        if mode is SAME:
            assert [final.tolist() for final in infos["final_obs"][4:]] == [[0, 2]] * 2
            assert infos["_final_obs"].tolist() == cut
            assert infos["final_info"]["worker_restarted"].tolist() == cut
            assert observation[4:].tolist() == [[0, 0]] * 2
        else:
            assert observation[4:].tolist() == [[0, 2]] * 2
            assert infos["worker_restarted"].tolist() == infos["_worker_restarted"].tolist() == cut
        if mode is DISABLED:
            assert envs.reset(options={"reset_mask": truncated})[0][4:, 1].tolist() == [0, 0]
        observation, reward, _, truncated, _ = envs.step(nothing)
        n = 0 if mode is AutoresetMode.NEXT_STEP else 1  # there, this step is the reset
        assert (reward.tolist(), observation[4:, 1].tolist()) == ([4] * 4 + [n] * 2, [n, n])
        assert not truncated.any()
        assert envs.step(nothing)[1].tolist() == [5] * 4 + [n + 1] * 2


@pytest.mark.slow
def test_a_replacement_whose_rows_are_reset_in_parts(tmp_path: Path) -> None:
    fault, nothing = Fault("kill", at=2, marker=str(tmp_path / "marker")), np.zeros(6, int)
    with ShmVectorEnv(
        with_fault(fault, SAME), num_envs=6, in_series=2, on_worker_failure="restart", step_timeout=60
    ) as envs:
        envs.reset(seed=1)
        envs.step(nothing)
        os.kill(envs.worker_pids[2], 9)
        observation, _ = envs.reset(seed=3, options={"reset_mask": np.arange(6) == 4})
        assert observation[:, 1].tolist() == [1, 1, 1, 1, 0, 1]
        _, _, _, truncated, infos = envs.step(nothing)
        assert truncated.tolist() == [False] * 4 + [True] * 2
        assert [final[1] for final in infos["final_obs"][4:]] == [0, 1]
        assert envs.step(nothing)[1].tolist() == [3] * 4 + [1] * 2


@pytest.mark.slow
@modes
@pytest.mark.parametrize("is_cut_first", [True, False])
def test_after_a_replacement_rows_that_are_reset_one_by_one_keep_their_episodes(
    is_cut_first: bool, mode: AutoresetMode
) -> None:
    env_fn, actions = partial(synced, partial(gym.make, "CartPole-v1"), mode=mode), np.array([0, 1, 1])
    alone = [gym.make("CartPole-v1") for _ in range(3)]
    with ShmVectorEnv(env_fn, num_envs=3, n_workers=1, on_worker_failure="restart") as envs:
        envs.reset(seed=1)
        before = envs.step(actions)[0]
        os.kill(envs.worker_pids[0], 9)
        if is_cut_first:
            observation, _, _, truncated, infos = envs.step(actions)
            assert truncated.all()
            if mode is SAME:
                assert_same(np.stack(infos["final_obs"]), before)
            else:
                assert_same(observation, before)
        for row in range(3):
            observation, _ = envs.reset(seed=[9, 9 + row, 99], options={"reset_mask": np.arange(3) == row})
            begun = alone[row].reset(seed=[9, 10, 99][row])[0]
            assert_same(observation[row], begun)
        for _ in range(3):
            observation, reward, _, truncated, _ = envs.step(actions)
            for row, env in enumerate(alone):
                assert_same(observation[row], env.step(actions[row])[0])
            assert (reward.tolist(), truncated.tolist()) == ([1] * 3, [False] * 3)
    for env in alone:
        env.close()


def test_no_row_is_ready_while_its_worker_still_writes_the_others() -> None:
    with ShmVectorEnv(counting, num_envs=4, n_workers=2) as envs:
        envs.reset()
        envs.send(np.zeros(4, int))
        exchange = envs._exchange  # between two words that a worker writes, no public call can look
        until(exchange.is_answered)
        assert exchange.ready.tolist() == [0, 1, 2, 3]
        replied = exchange._rows.replied
        for row in (2, 3):  # as if their worker had written the reply of only the other one
            replied[row] -= 1
            assert exchange.ready.tolist() == [0, 1]
            replied[row] += 1
        assert envs.recv(4)[4]["env_id"].tolist() == [0, 1, 2, 3]


class Reusing(SyncVectorEnv):
    """Returns the same array of observations at each call. Its third step fails once."""

    def __init__(self, num_envs: int, file: str) -> None:
        super().__init__(
            [partial(CountingEnv, length=50)] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP, copy=False
        )
        self.file, self.n_steps = file, 0

    def step(self, actions: Any) -> Any:
        self.n_steps += 1
        if self.n_steps == 3 and not os.path.exists(self.file):
            Path(self.file).touch()
            raise RuntimeError("once")
        return super().step(actions)

    def scribble(self) -> None:
        self._observations[...] = 77


def test_the_first_observation_after_a_replacement_is_kept_as_a_copy(tmp_path: Path) -> None:
    env_fn = partial(Reusing, file=str(tmp_path / "failed"))
    with ShmVectorEnv(env_fn, num_envs=2, n_workers=1, on_worker_failure="restart") as envs:
        begin = envs.reset(seed=1)[0]
        for _ in range(3):
            infos = envs.step(np.zeros(2, int))[4]
        assert infos["worker_restarted"].all()
        envs.call("scribble")
        observation, reward, terminated, truncated, _ = envs.step(np.zeros(2, int))
        assert_same((observation, reward), (begin, np.zeros(2)))
        assert not (terminated | truncated).any()


@pytest.mark.slow
def test_numbers_that_are_not_finite_are_refused() -> None:
    class Ends(CountingEnv):
        def observe(self) -> Any:
            return np.array([np.nan if self.count == self.length else 0, 0], np.float32)

        step_into = None  # type: ignore[assignment]

    with ShmVectorEnv(partial(synced, partial(Ends, length=2)), num_envs=3, n_workers=2, check_finite=True) as envs:
        envs.reset()
        envs.step(np.zeros(3, int))
        with pytest.raises(SpaceError, match=r"final_obs of env_rank 0 must be finite .* got nan at index \(0,\)"):
            envs.step(np.zeros(3, int))
        assert envs.step(np.zeros(3, int))[1].tolist() == [1, 1, 1]
