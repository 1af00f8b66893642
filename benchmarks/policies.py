"""Larger policies for `peers.py`: two convolutional networks for 84 x 84 x 4 bytes, and an LSTM."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def _conv(n_in: int, n_out: int, size: int, stride: int = 1, padding: int = 0) -> nn.Conv2d:
    return nn.Conv2d(n_in, n_out, size, stride, padding)


class _Cnn(nn.Module):
    """A body with `n_features` outputs, a policy and a value."""

    def __init__(self, body: nn.Module, n_features: int, action_space: Any) -> None:
        super().__init__()
        self.body = body
        self.policy, self.value = nn.Linear(n_features, int(action_space.n)), nn.Linear(n_features, 1)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(observation.permute(0, 3, 1, 2).float() / 255)
        return self.policy(features), self.value(features).squeeze(-1)


class NatureCnn(_Cnn):
    """Three convolutions and one hidden layer."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        convolutions = _conv(4, 32, 8, 4), nn.ReLU(), _conv(32, 64, 4, 2), nn.ReLU(), _conv(64, 64, 3), nn.ReLU()
        super().__init__(
            nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU()), 512, action_space
        )


class _Residual(nn.Module):
    """Two convolutions, whose result is added to the input."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.ReLU(), _conv(n, n, 3, padding=1), nn.ReLU(), _conv(n, n, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class ImpalaCnn(_Cnn):
    """Fifteen convolutions in three sections of 16, 32 and 32 channels."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        layers: list[nn.Module] = []
        for n_in, n in ((4, 16), (16, 32), (32, 32)):
            layers += [_conv(n_in, n, 3, padding=1), nn.MaxPool2d(3, 2, padding=1), _Residual(n), _Residual(n)]
        hidden = nn.Flatten(), nn.ReLU(), nn.Linear(32 * 11 * 11, 256), nn.ReLU()
        super().__init__(nn.Sequential(*layers, *hidden), 256, action_space)


class Lstm(nn.Module):
    """An encoder, an LSTM of 64 units, a policy and a value."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(observation_space.shape[0], 64), nn.Tanh())
        self.core, self.state_shape = nn.LSTMCell(64, 64), ((64,), (64,))
        self.policy, self.value = nn.Linear(64, int(action_space.n)), nn.Linear(64, 1)

    def forward(
        self, observation: Tensor, prev_action: Tensor, prev_reward: Tensor, state: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        hidden, cell = self.core(self.encoder(observation), state)
        return self.policy(hidden), self.value(hidden).squeeze(-1), (hidden, cell)
