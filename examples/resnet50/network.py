# SPDX-License-Identifier: Apache-2.0
"""ResNet-50 as it is trained on ImageNet (He et al., 2016), of any width."""


def resnet50(shape, classes, width=64, momentum=0.9):
    """Returns the network, with logits.

    Convolutions have no biases, strides are in those of 3 x 3, and the last BatchNormalization of each block begins
    with 0, so that blocks begin as what goes around them (Goyal et al., 2017). With 64 filters and 1001 classes it has
    25,559,081 trainable numbers.

    Args:
        shape: of an image. Those below 64 pixels are halved once before the blocks, not twice.
        classes: how many.
        width: filters of the first convolution; 64 are those of the paper.
        momentum: of BatchNormalization's moving statistics.
    """
    from keras import Input, Model, layers

    def convolved(x, filters, kernel, strides=1, begin="ones"):
        x = layers.Conv2D(
            filters, kernel, strides=strides, padding="same", use_bias=False, kernel_initializer="he_normal"
        )(x)
        return layers.BatchNormalization(momentum=momentum, epsilon=1e-5, gamma_initializer=begin)(x)

    image = x = Input(shape)
    if shape[0] >= 64:
        x = layers.ReLU()(convolved(x, width, 7, strides=2))
        x = layers.MaxPooling2D(3, 2, padding="same")(x)
    else:
        x = layers.ReLU()(convolved(x, width, 3, strides=2))
    for stage, blocks in enumerate((3, 4, 6, 3)):
        filters = width << stage
        for block in range(blocks):
            strides = 2 if stage and not block else 1
            around = x if block else convolved(x, 4 * filters, 1, strides)
            x = layers.ReLU()(convolved(x, filters, 1))
            x = layers.ReLU()(convolved(x, filters, 3, strides))
            x = layers.ReLU()(layers.Add()([around, convolved(x, 4 * filters, 1, begin="zeros")]))
    x = layers.GlobalAveragePooling2D()(x)
    return Model(image, layers.Dense(classes, kernel_initializer="he_normal")(x))
