// The kernels of decode steps as a library, which launches them on an emulated device.

#include "decode_kernels.cu"

#include <utility>

namespace {

template <typename... Arguments, std::size_t... At>
void launch(void (*kernel)(Arguments...), const int* grid, int threads, void** arguments, std::index_sequence<At...>) {
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {threads, 1, 1};
  for (int z = 0; z < grid[2]; ++z)
    for (int y = 0; y < grid[1]; ++y)
      for (int x = 0; x < grid[0]; ++x) {
        blockIdx = {x, y, z};
        Block(threads, [&] { kernel(*static_cast<Arguments*>(arguments[At])...); }).run();
      }
}

template <typename... Arguments>
void launch(void (*kernel)(Arguments...), const int* grid, int threads, void** arguments) {
  launch(kernel, grid, threads, arguments, std::index_sequence_for<Arguments...>());
}

}  // namespace

// Runs a kernel for every block of the grid.  arguments: the address of each. Returns 0 if there is no such kernel.
extern "C" int launch_kernel(const char* name, const int* grid, int threads, void** arguments) {
#define FS_KERNEL(kernel) \
  if (!std::strcmp(name, #kernel)) return launch(kernel, grid, threads, arguments), 1
  FS_KERNEL(rotate_and_store);
  FS_KERNEL(attend);
  FS_KERNEL(combine);
  FS_KERNEL(normalise);
  FS_KERNEL(add_and_normalise);
  FS_KERNEL(apply_gates);
#undef FS_KERNEL
  return 0;
}
