#define KERNELS_NAMESPACE avx512
#define KERNELS_TABLE kernels_avx512
#define KERNELS_NAME "avx512"
#define KERNELS_WIDTH 64
#include "kernels_impl.hpp"
