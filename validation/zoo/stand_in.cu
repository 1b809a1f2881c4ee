// One block stands for a channel of NCCL; measure_contention.py says what it moves.
__device__ __forceinline__ long long now_ns() {
  long long t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
__device__ __forceinline__ unsigned add(unsigned a, unsigned b) {
  return __float_as_uint(__uint_as_float(a) + __uint_as_float(b));
}
extern "C" __global__ void __launch_bounds__(640, 1)
stand_in(const uint4* gradient, uint4* result, const uint4* received, uint4* sent, int gradient_vectors,
         int fifo_vectors, int chunk_ns, int longest_us, volatile int* stop, long long* record) {
  __shared__ int over;
  const int chunk = 640 * 8;
  gradient += (long long)blockIdx.x * gradient_vectors;
  result += (long long)blockIdx.x * gradient_vectors;
  received += (long long)blockIdx.x * fifo_vectors;
  sent += (long long)blockIdx.x * fifo_vectors;
  const long long begun = now_ns();
  long long chunks = 0;
  int place = 0, slot = 0;
  if (threadIdx.x == 0) over = 0;
  __syncthreads();
  while (!over) {
    uint4 a[8], b[8];
    if (chunks & 1) {
#pragma unroll
      for (int i = 0; i < 8; i++) a[i] = received[slot + i * 640 + threadIdx.x];
#pragma unroll
      for (int i = 0; i < 8; i++) result[place + i * 640 + threadIdx.x] = a[i];
#pragma unroll
      for (int i = 0; i < 8; i++) sent[slot + i * 640 + threadIdx.x] = a[i];
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) a[i] = gradient[place + i * 640 + threadIdx.x];
#pragma unroll
      for (int i = 0; i < 8; i++) b[i] = received[slot + i * 640 + threadIdx.x];
#pragma unroll
      for (int i = 0; i < 8; i++) {
        a[i].x = add(a[i].x, b[i].x);
        a[i].y = add(a[i].y, b[i].y);
        a[i].z = add(a[i].z, b[i].z);
        a[i].w = add(a[i].w, b[i].w);
        sent[slot + i * 640 + threadIdx.x] = a[i];
      }
    }
    place = place + 2 * chunk <= gradient_vectors ? place + chunk : 0;
    slot = slot + 2 * chunk <= fifo_vectors ? slot + chunk : 0;
    chunks++;
    __syncthreads();
    if (threadIdx.x == 0) {
      const long long target = begun + chunks * (long long)chunk_ns;
      long long now = now_ns();
      while (now < target && !*stop) now = now_ns();
      if (*stop || now - begun > 1000LL * longest_us) over = 1;
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    record[2 * blockIdx.x] = chunks * (chunk * 16LL);
    record[2 * blockIdx.x + 1] = now_ns() - begun;
  }
}
