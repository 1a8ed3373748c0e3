"""How the demo checkpoint is trained: one module for each stage, strung together by scripts/lab/train_demo.py.

    tokenizer -> data (worker processes) -> noise (on the device) -> training (model, optimizers) -> checkpoint -> check

`recipe` holds the sizes of all of them. `block` has the stages that block diffusion does otherwise, for
scripts/lab/train_demo_block.py.
"""
