#define KERNELS_NAMESPACE avx2
#define KERNELS_TABLE kernels_avx2
#define KERNELS_NAME "avx2"
#define KERNELS_WIDTH 32
#include "kernels_impl.hpp"
