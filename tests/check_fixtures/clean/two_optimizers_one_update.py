import torch
import torch.nn.functional as F


class Agent:
    def __init__(self, actor, critic):
        self.actor, self.critic = actor, critic
        self.a_opt = torch.optim.Adam(actor.parameters(), lr=3e-4)
        self.c_opt = torch.optim.Adam(critic.parameters(), lr=3e-4)
        self.scaler = torch.amp.GradScaler("cuda")

    def learn(self, obs, act, ret):
        self.a_opt.zero_grad(set_to_none=True)
        self.c_opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            value = self.critic(obs).squeeze(-1)
            v_loss = F.mse_loss(value, ret)
            adv = (ret - value.float()).detach()
            logp = F.log_softmax(self.actor(obs), dim=-1).gather(1, act[:, None]).squeeze(1)
            p_loss = -(logp * adv).mean()
        self.scaler.scale(v_loss).backward()
        self.scaler.scale(p_loss).backward()
        for opt, net in ((self.a_opt, self.actor), (self.c_opt, self.critic)):
            self.scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            self.scaler.step(opt)
        self.scaler.update()
