"""A toy autograd for teaching; methods are called like torch's but are not."""


class Value:
    def __init__(self, data, parents=()):
        self.data, self.parents, self.grad = data, parents, 0.0

    def half(self):
        return Value(self.data / 2, (self,))

    def sum(self, other):
        return Value(self.data + other.data, (self, other))

    def backward(self, seed=1.0):
        self.grad += seed
        for p in self.parents:
            p.backward(seed)


class Optimizer:
    def __init__(self, params, lr):
        self.params, self.lr = params, lr

    def step(self):
        for p in self.params:
            p.data -= self.lr * p.grad
            p.grad = 0.0


class Scaler:
    def scale(self, v):
        return v

    def step(self, opt):
        opt.step()


def fit():
    w = Value(1.0)
    opt, scaler = Optimizer([w], 0.1), Scaler()
    for _ in range(3):
        loss = w.half().sum(w)
        scaler.scale(loss).backward()
        opt.step()
    return w.data
