"""Feature scaling for a boosting pipeline; `scaler`, `step` and `update` have nothing to do with AMP."""
from sklearn.preprocessing import StandardScaler


class RunningScaler:
    def __init__(self, factor=2.0, init_scale=1.0):
        self.factor = factor
        self.scale_value = init_scale

    def scale(self, x):
        return x * self.scale_value

    def step(self, stage):
        return stage.run()

    def update(self):
        self.scale_value *= self.factor


class Stage:
    def backward(self):
        return "back"

    def half(self):
        return self

    def run(self):
        return self.half().backward()


def pipeline(rows):
    std = StandardScaler().fit(rows)
    scaler = RunningScaler()
    out = []
    for row in std.transform(rows):
        out.append(scaler.scale(row))
        scaler.step(Stage())
    return out
