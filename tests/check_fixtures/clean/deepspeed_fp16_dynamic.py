import deepspeed


def ds_config(args):
    return {
        "train_batch_size": args.batch,
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
        "optimizer": {"type": "Adam", "params": {"lr": args.lr, "betas": [0.9, 0.95]}},
        "zero_optimization": {"stage": 2},
    }


def main(args, model, loader, loss_fn):
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters(), config=ds_config(args))
    for step, (x, y) in enumerate(loader):
        out = engine(x.to(engine.device))
        engine.backward(loss_fn(out.float(), y.to(engine.device)))
        engine.step()
        if step % 1000 == 0:
            engine.save_checkpoint(args.out, tag=str(step))
