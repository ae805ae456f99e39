import torch
import torch.nn as nn

PRECISION = {"full": torch.float32, "half": torch.bfloat16}


def embed(model, batches):
    model.eval()
    rows = []
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.float32):  # expect: REGION_DTYPE
        for ids in batches:
            hidden = model(ids)
            rows.append(hidden.mean(dim=1))
    return torch.cat(rows)


def main():
    model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 64), nn.LayerNorm(64))
    batches = [torch.randint(0, 1000, (8, 32)) for _ in range(4)]
    vectors = embed(model, batches)
    print(vectors.shape, vectors.dtype)


if __name__ == "__main__":
    main()
