/* What a training step in float32 on a processor does beside products of matrices: attention and GELU, with their
 * gradients. `nn/native.py` compiles this file and calls it.
 */
#include "attention.h"
#include "gelu.h"
