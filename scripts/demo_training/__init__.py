"""How the demo checkpoint is trained: one module for each stage, strung together by scripts/train_demo.py.

    tokenizer -> data (worker processes) -> noise (on the device) -> training (model, optimizers) -> checkpoint -> check

`recipe` holds the sizes of all of them.
"""
