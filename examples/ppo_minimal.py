"""PPO on CartPole in 60 lines: a model, a loss, a loop. Takes some ten seconds: python examples/ppo_minimal.py"""

import torch
from torch import nn

from penstock import CategoricalPgAgent, ParallelSampler
from penstock.learning import gae


class ActorCritic(nn.Module):
    def __init__(self, observation_space, action_space):
        super().__init__()
        n_inputs, n_actions = observation_space.shape[0], int(action_space.n)
        self.policy = nn.Sequential(nn.Linear(n_inputs, 64), nn.Tanh(), nn.Linear(64, n_actions))
        self.critic = nn.Sequential(nn.Linear(n_inputs, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, observation):
        return self.policy(observation), self.critic(observation).squeeze(-1)  # logits, value


def ppo_loss(agent, part):
    now = agent.evaluate(part)  # log_prob, entropy and value with the present parameters
    old_log_prob = part.agent.agent_info.log_prob
    advantage = part.targets.advantage
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    ratio = (now.log_prob - old_log_prob).exp()
    clipped_ratio = ratio.clamp(0.8, 1.2)
    policy_loss = -torch.min(ratio * advantage, clipped_ratio * advantage).mean()
    value_loss = (now.value - part.targets.value).square().mean()
    return policy_loss + 0.5 * value_loss - 0.01 * now.entropy.mean()


def main(n_batches=40):
    torch.set_num_threads(1)  # a second thread does not help with networks this small
    torch.manual_seed(0)  # for the order of minibatches
    agent = CategoricalPgAgent(ActorCritic)
    with ParallelSampler("CartPole-v1", batch_T=128, batch_B=16) as sampler:
        sampler.initialize(agent, seed=0, bootstrap_value=True)
        optimizer = torch.optim.Adam(agent.model.parameters(), lr=2e-3)
        for itr in range(n_batches):
            samples, traj_infos = sampler.obtain_samples(itr)  # [128, 16, ...]
            advantage, target = gae(samples, discount=0.98, lambda_=0.95)
            samples = samples.with_targets(advantage=advantage, value=target)
            for _ in range(8):
                for part in samples.minibatches(8):  # all steps in random order
                    loss = ppo_loss(agent, part)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            agent.sync_shared_memory()  # the workers get the new parameters
            returns = [info.Return for info in traj_infos]
            mean = sum(returns) / len(returns) if returns else float("nan")
            print(f"batch {itr}: {len(returns)} episodes, mean return {mean:.0f}")
    return mean


if __name__ == "__main__":
    main()
