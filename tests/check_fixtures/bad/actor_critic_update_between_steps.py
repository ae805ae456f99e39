import torch
import torch.nn.functional as F


class SACAgent:
    def __init__(self, actor, critic, lr=3e-4):
        self.actor, self.critic = actor, critic
        self.actor_opt = torch.optim.Adam(actor.parameters(), lr=lr)
        self.critic_opt = torch.optim.Adam(critic.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cuda")

    def losses(self, batch):
        q = self.critic(batch["obs"], batch["act"])
        critic_loss = F.mse_loss(q, batch["target_q"])
        actor_loss = -self.critic(batch["obs"], self.actor(batch["obs"])).float().mean()
        return actor_loss, critic_loss

    def learn(self, batch):
        self.actor_opt.zero_grad(set_to_none=True)
        self.critic_opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            actor_loss, critic_loss = self.losses(batch)
        self.scaler.scale(critic_loss).backward(retain_graph=True)
        self.scaler.scale(actor_loss).backward()
        self.scaler.step(self.critic_opt)
        self.scaler.update()  # expect: SCALER_UPDATE_MISPLACED
        self.scaler.step(self.actor_opt)
        self.scaler.update()
        return actor_loss.item(), critic_loss.item()
