"""The order of calls on a vector environment, and the errors of calls out of order, which are also Gymnasium's."""

from __future__ import annotations

import enum
import multiprocessing

from gymnasium import error as gymnasium_error

from penstock.errors import PenstockError, SamplerClosedError, SamplerStateError
from penstock.workers.call_guard import CallGuard


class State(enum.Enum):
    """The state of a vector environment. The value names the calls that are expected next."""

    NEW = "reset"
    READY = "step, step_async, send or reset"
    STEPPING = "step_wait"
    RESETTING = "reset_wait"
    SENT = "recv, send or reset"
    BROKEN = "close"
    CLOSED = "none"


#: The call that is not finished, by state.
_PENDING = {State.STEPPING: "step", State.RESETTING: "reset", State.SENT: "send"}
_WAITS = ("step_wait", "reset_wait", "recv")


class VectorClosedError(SamplerClosedError, gymnasium_error.ClosedEnvironmentError):
    """A call came after `close`."""


class PendingCallError(SamplerStateError, gymnasium_error.AlreadyPendingCallError):
    """A call came while another call was not finished. `name` is the name of the unfinished call."""

    def __init__(self, message: str, name: str = "") -> None:
        Exception.__init__(self, message)
        self.name = name


class NoPendingCallError(SamplerStateError, gymnasium_error.NoAsyncCallError):
    """`step_wait`, `reset_wait` or `recv` came without a call to wait for. `name` is the name of this call."""

    def __init__(self, message: str, name: str = "") -> None:
        Exception.__init__(self, message)
        self.name = name


class WaitTimeoutError(PenstockError, multiprocessing.TimeoutError, TimeoutError):
    """A call did not finish within `timeout` seconds. It continues: wait again for its results."""


class VectorGuard(CallGuard[State]):
    """The guard of a vector environment."""

    def __init__(self) -> None:
        super().__init__(State, "vector environment", "close", owned_by_process=True)

    def _refusal(self, name: str) -> SamplerStateError:
        refusal = super()._refusal(name)
        if self.state is State.CLOSED:
            return VectorClosedError(*refusal.args)
        if self.state in _PENDING:
            return PendingCallError(str(refusal), _PENDING[self.state])
        if name in _WAITS and self.state is not State.BROKEN:
            return NoPendingCallError(str(refusal), name)
        return refusal
