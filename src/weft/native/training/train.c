/* What a training step in float32 on a CPU computes besides matrix products: attention and GELU, with their gradients.
 * Compiled and called by `nn/native.py`. */
#include "attention.h"
#include "gelu.h"

/* Sizes of the structs that `nn/native.py` declares as well, in its order. */
const int32_t weft_struct_sizes[] = {sizeof(Heads), sizeof(Attention), sizeof(Gelu)};
