"""One environment: its factory, its seeds, its spaces, its infos; batched environments; toys for tests."""

from penstock.envs.batched import BatchedCartPole, BatchedEnvPool, SameStep
from penstock.envs.examples import example_of, observation_example
from penstock.envs.factory import EnvContext, EnvFactory, EnvFn, build_example_env, close_example_env, env_factories
from penstock.envs.infos import InfoWanted, InfoWriter, info_example
from penstock.envs.recorded_episode import RecordedEpisode, Transition
from penstock.envs.rows import action_splitter, arrays_like, write_row
from penstock.envs.seat_wrappers import OwnClocks, Seats
from penstock.envs.seeding import ColumnStreams, EpisodePlan, Purpose, fresh_seed, independent_seeds, stream
from penstock.envs.state import check_env_state
from penstock.envs.toy import CountingEnv, NestedEnv, ScriptedGame, SlowEnv
from penstock.envs.wrappers import BatchedEpisodicLife, EpisodicLife, MaskInObservation

__all__ = [
    "BatchedCartPole",
    "BatchedEnvPool",
    "BatchedEpisodicLife",
    "ColumnStreams",
    "CountingEnv",
    "EnvContext",
    "EnvFactory",
    "EnvFn",
    "EpisodePlan",
    "EpisodicLife",
    "InfoWanted",
    "InfoWriter",
    "MaskInObservation",
    "NestedEnv",
    "OwnClocks",
    "Purpose",
    "RecordedEpisode",
    "SameStep",
    "ScriptedGame",
    "Seats",
    "SlowEnv",
    "Transition",
    "action_splitter",
    "arrays_like",
    "build_example_env",
    "check_env_state",
    "close_example_env",
    "env_factories",
    "example_of",
    "fresh_seed",
    "independent_seeds",
    "info_example",
    "observation_example",
    "stream",
    "write_row",
]
