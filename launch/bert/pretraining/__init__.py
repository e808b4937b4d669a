"""BERT pretraining with shardfuse's sharded optimizers: data, model, loop and reports."""
