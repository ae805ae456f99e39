import torch
import torch.nn as nn

torch.manual_seed(100)
N = 5


class GridWorld:
    def reset(self):
        self.pos = torch.randint(0, N, (2,)).tolist()
        return self.obs()

    def obs(self):
        v = torch.zeros(2 * N)
        v[self.pos[0]] = 1
        v[N + self.pos[1]] = 1
        return v

    def step(self, a):
        dx, dy = [(1, 0), (-1, 0), (0, 1), (0, -1)][a]
        self.pos = [min(N - 1, max(0, self.pos[0] + dx)), min(N - 1, max(0, self.pos[1] + dy))]
        done = self.pos == [N - 1, N - 1]
        return self.obs(), (1.0 if done else -0.05), done


policy = nn.Sequential(nn.Linear(2 * N, 32), nn.Tanh(), nn.Linear(32, 4))
opt = torch.optim.Adam(policy.parameters(), lr=1e-2)
env = GridWorld()
avg = 0.0
for episode in range(200):
    s, logps, rewards = env.reset(), [], []
    for _ in range(25):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = policy(s.unsqueeze(0))[0]
        gumbel = -torch.log(-torch.log(torch.rand(4)))
        a = (logits.detach().float() + gumbel).argmax()
        s, r, done = env.step(a.item())
        logps.append(logits.float().log_softmax(-1)[a])
        rewards.append(r)
        if done:
            break
    g, returns = 0.0, []
    for r in reversed(rewards):
        g = r + 0.97 * g
        returns.insert(0, g)
    returns = torch.tensor(returns)
    adv = (returns - returns.mean()) / (returns.std() + 1e-6)
    loss = -(torch.stack(logps) * adv).sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
    avg = 0.95 * avg + 0.05 * sum(rewards)
    if episode % 20 == 0 or episode == 199:
        print(f"episode {episode} return {avg:.3f} loss {loss.item():.3f}")
