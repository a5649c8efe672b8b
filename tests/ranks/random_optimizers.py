# SPDX-License-Identifier: Apache-2.0
"""Random optimizers of Keras."""

import keras

optimizers = keras.optimizers

# Ranks cannot agree on the sign of a gradient that is nothing but rounding, as of the bias of keys of attention: so
# epsilons are large, and Lion and Muon, which take every gradient as large as any other, have networks of their own.
KINDS = {
    "SGD": lambda draw: {"momentum": draw.choice([0.0, 0.9]), "nesterov": draw.random() < 0.3},
    "Nadam": lambda draw: {"epsilon": 1e-2},
    "RMSprop": lambda draw: {"epsilon": 1e-2, "centered": draw.random() < 0.5, "momentum": 0.5},
    "Adam": lambda draw: {"epsilon": 1e-2, "amsgrad": draw.random() < 0.5},
    "AdamW": lambda draw: {"epsilon": 1e-2, "weight_decay": 0.02},
    "Adamax": lambda draw: {"epsilon": 1e-2},
    "Adagrad": lambda draw: {"epsilon": 1e-2},
    "Adadelta": lambda draw: {"epsilon": 1e-2},
    "Ftrl": lambda draw: {"l1_regularization_strength": 0.001},
    "Lamb": lambda draw: {"epsilon": 1e-1},
    "Adafactor": lambda draw: {"epsilon_1": 1e-3},
}

SHARP = {
    "Lion": lambda draw: {"beta_1": draw.choice([0.5, 0.9])},
    "Muon": lambda draw: {"adam_lr_ratio": 0.5, "epsilon": 1e-2, "exclude_layers": ["out"]},
}


def make(draw, say, sharp=False):
    """Returns an optimizer, and whether its learning rate can be set. `sharp`: one that makes small gradients large."""
    options = draw.choice([{}, {}, {"clipnorm": 0.5}, {"global_clipnorm": 0.7}, {"clipvalue": 0.05},
                           {"use_ema": True, "ema_momentum": 0.9}, {"weight_decay": 0.01},
                           {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 2},
                           {"gradient_accumulation_steps": draw.choice([2, 3])}])  # fmt: skip
    rate = draw.choice([0.03, 0.03, optimizers.schedules.CosineDecay(0.05, 9)])
    settable = isinstance(rate, float)
    kinds = SHARP if sharp else KINDS
    name = draw.choice([*SHARP] if sharp else [*KINDS, "SGD", "SGD", "SGD"])
    optimizer = getattr(optimizers, name)(rate, **kinds[name](draw) | options)
    say(f"{name} {options} {'' if settable else 'schedule'}")
    if optimizer.weight_decay and draw.random() < 0.5:
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        say("no decay of biases")
    if draw.random() < 0.15:
        say("loss scale")
        growth = draw.choice([2, 2000])
        optimizer = optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**7, dynamic_growth_steps=growth)
    return optimizer, settable
