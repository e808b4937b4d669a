"""Hugging Face's Trainer, whose DDP averages gradients: give it optimizer and callback.

torchrun --standalone --nproc-per-node 2 launch/examples/hf_trainer.py
"""

import gc

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)

from shardfuse import ShardedLamb
from shardfuse.integrations import trainer_callback

STEPS = 60


def main() -> None:
    args = TrainingArguments(
        "runs/trainer",
        max_steps=STEPS,
        per_device_train_batch_size=16,
        average_tokens_across_devices=False,  # this model's loss does not count tokens
        logging_steps=10,
        save_steps=20,
        ddp_find_unused_parameters=False,  # for this model DDP would warn of Trainer's choice
        use_cpu=not torch.accelerator.is_available(),
    )
    torch.manual_seed(0)
    tokens = torch.randint(0, 20, (512, 8))
    data = [{"input_ids": ids, "labels": int(ids[0] < 10)} for ids in tokens]
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=20, hidden_size=32, **shape)
    # args.device also starts the process group, which has to be there before the optimizer.
    model = BertForSequenceClassification(config).to(args.device)
    optimizer = ShardedLamb(model, lr=0.05, variant="google")
    trainer = Trainer(
        model,
        args,
        train_dataset=data,
        optimizers=(optimizer, get_linear_schedule_with_warmup(optimizer, 5, STEPS)),
        callbacks=[trainer_callback()],  # brings the states to the rank that saves them
    )
    trainer.train()  # resume_from_checkpoint=True: it goes on from the last checkpoint
    if trainer.is_world_process_zero():
        for log in trainer.state.log_history[:-1]:
            print(f"step {log['step']}  loss {log['loss']:.4f}", flush=True)


if __name__ == "__main__":
    main()
    gc.collect()  # what Trainer holds, first: the group may never end if DDP lets go of it last
    torch.distributed.destroy_process_group()
