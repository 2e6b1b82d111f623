/* All-reduce by an MPI library, timed as shm_loop.py times ours: per size, blocks of back-to-back calls on the same
 * two buffers (on one, in place, if IN_PLACE is set); rank 0 prints the mean time of a call in each block.
 *
 * mpi_loop BLOCK_NS BLOCKS SIZE... */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  const double block_ns = atof(argv[1]);
  const int blocks = atoi(argv[2]);
  char version[MPI_MAX_LIBRARY_VERSION_STRING];
  int length;
  MPI_Get_library_version(version, &length);
  char* end_of_line = strpbrk(version, "\n\"\\");
  if (end_of_line) *end_of_line = 0;
  if (rank == 0) printf("{\"version\": \"%s\", \"ns\": {", version);
  for (int a = 3; a < argc; ++a) {
    const size_t bytes = strtoull(argv[a], NULL, 10);
    const int count = (int)(bytes / sizeof(float));
    float *in, *out;
    if (posix_memalign((void**)&in, 4096, bytes + 4096) || posix_memalign((void**)&out, 4096, bytes + 4096)) return 1;
    const void* source = getenv("IN_PLACE") ? MPI_IN_PLACE : in;
    memset(in, 0, bytes);
    memset(out, 0, bytes);
    for (int i = 0; i < 3; ++i) MPI_Allreduce(source, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    double start = now_ns();
    for (int i = 0; i < 4; ++i) MPI_Allreduce(source, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    int calls = (int)(block_ns / ((now_ns() - start) / 4 + 1)) + 1;
    MPI_Bcast(&calls, 1, MPI_INT, 0, MPI_COMM_WORLD);
    if (rank == 0) printf("%s\"%zu\": [", a == 3 ? "" : ", ", bytes);
    for (int b = 0; b < blocks; ++b) {
      MPI_Barrier(MPI_COMM_WORLD);
      start = now_ns();
      for (int i = 0; i < calls; ++i) MPI_Allreduce(source, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
      if (rank == 0) printf("%s%.1f", b ? ", " : "", (now_ns() - start) / calls);
    }
    if (rank == 0) printf("]");
    free(in);
    free(out);
  }
  if (rank == 0) printf("}}\n");
  MPI_Finalize();
  return 0;
}
