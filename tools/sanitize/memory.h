// Buffers that notice: exact ends, canaries in front, contents that must or must not change.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "custom_ops/common/cpu_parallel.h"
#include "custom_ops/common/types.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

namespace paddle_fused {
namespace sanitize {

inline void Fail(const std::string& what) {
  std::fprintf(stderr, "grid: %s\n", what.c_str());
  std::exit(1);
}

// A small generator: the same numbers on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2654435761u + 88172645463325252u) {}
  uint64_t Bits() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_;
  }
  double Real() { return static_cast<double>(Bits() >> 11) * 0x1p-53; }  // [0, 1)

 private:
  uint64_t state_;
};

inline uint16_t HighHalf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>(bits >> 16);
}

// A value in the storage of dtype. float16 gets a number whose bits are made directly: the exact
// value does not matter here.
inline void StoreValue(DType dtype, double value, void* at) {
  const float narrow = static_cast<float>(value);
  switch (dtype) {
    case DType::kFloat64:
      std::memcpy(at, &value, 8);
      return;
    case DType::kFloat32:
      std::memcpy(at, &narrow, 4);
      return;
    case DType::kBFloat16: {
      const uint16_t bits = HighHalf(narrow);
      std::memcpy(at, &bits, 2);
      return;
    }
    default: {
      const auto tenth = static_cast<uint16_t>(static_cast<int>(value * 512) & 0x3ff);
      const uint16_t bits = static_cast<uint16_t>((value < 0 ? 0xb800 : 0x3800) | tenth);
      std::memcpy(at, &bits, 2);
    }
  }
}

// The bits of a dtype; no mantissa means bytes that are no floats.
struct Format {
  explicit Format(DType dtype)
      : size(SizeOf(dtype)),
        mantissa(dtype == DType::kFloat64   ? 52
                 : dtype == DType::kFloat32 ? 23
                 : dtype == DType::kFloat16 ? 10
                                            : 7),
        sign(uint64_t{1} << (8 * size - 1)),
        infinity((sign - 1) >> mantissa << mantissa) {}
  Format() : size(1), mantissa(0), sign(0), infinity(~uint64_t{0}) {}
  bool IsNan(uint64_t bits) const { return mantissa != 0 && (bits & ~sign) > infinity; }

  size_t size;
  int mantissa;
  uint64_t sign, infinity;
};

// Zeros, subnormals, the largest numbers, infinities and NaN of dtype, by their bits.
inline void StoreSpecial(DType dtype, uint64_t which, void* at) {
  const Format f(dtype);
  const uint64_t unit = uint64_t{1} << f.mantissa;
  const uint64_t magnitudes[] = {0, 1, unit - 1, f.infinity - 1, f.infinity, f.infinity | unit / 2};
  const uint64_t value = magnitudes[which % 6] | ((which / 6) % 2 == 0 ? 0 : f.sign);
  std::memcpy(at, &value, f.size);  // little endian
}

// `bytes` of memory that end where the allocation ends, `offset` bytes past an aligned address.
class Buffer {
 public:
  static constexpr size_t kFront = 64;
  Buffer(size_t bytes, size_t offset)
      : front_(kFront + offset),
        bytes_(bytes),
        memory_(static_cast<char*>(std::malloc(front_ + bytes))) {
    if (memory_ == nullptr) Fail("out of memory");
    std::memset(memory_, 0x3c, front_);
    ASAN_POISON_MEMORY_REGION(memory_, front_);
  }
  ~Buffer() {
    ASAN_UNPOISON_MEMORY_REGION(memory_, front_);
    std::free(memory_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  char* data() const { return memory_ + front_; }
  size_t bytes() const { return bytes_; }

  // The front is poisoned in whole granules of 8 bytes only: its last bytes need a look.
  bool FrontIsWhole() const {
    ASAN_UNPOISON_MEMORY_REGION(memory_, front_);
    bool whole = true;
    for (size_t i = 0; i < front_; ++i) whole = whole && memory_[i] == 0x3c;
    ASAN_POISON_MEMORY_REGION(memory_, front_);
    return whole;
  }

 private:
  size_t front_, bytes_;
  char* memory_;
};

// FNV-1a over everything that the kernels computed. Any NaN counts as one: which of two NaNs an
// addition passes on is the compiler's choice.
class Digest {
 public:
  void Add(const std::string& data, const Format& format) {
    for (size_t i = 0; i < data.size(); i += format.size) {
      uint64_t bits = 0;
      std::memcpy(&bits, data.data() + i, format.size);  // little endian
      hash_ = (hash_ ^ (format.IsNan(bits) ? ~uint64_t{0} : bits)) * 1099511628211u;
    }
  }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 14695981039346656037u;
};

// One launch: its buffers, and what must hold around it.
class Launch {
 public:
  Launch(std::string name, uint64_t seed, size_t misalign, bool specials)
      : name_(std::move(name)), random_(seed), misalign_(misalign), specials_(specials) {}

  const void* In(DType dtype, int64_t count) {
    const size_t size = SizeOf(dtype);
    auto buffer = New(static_cast<size_t>(count) * size, misalign_ * size);
    for (int64_t i = 0; i < count; ++i) {
      char* at = buffer->data() + static_cast<size_t>(i) * size;
      if (specials_ && random_.Bits() % 16 == 0) {
        StoreSpecial(dtype, random_.Bits(), at);
      } else {
        StoreValue(dtype, 4 * random_.Real() - 1.75, at);
      }
    }
    return Keep(std::move(buffer), &inputs_);
  }
  const void* Ids(bool int32, int64_t count, int64_t rows) {
    const size_t size = int32 ? 4 : 8;
    auto buffer = New(static_cast<size_t>(count) * size, misalign_ * size);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t id = static_cast<int64_t>(random_.Bits() % static_cast<uint64_t>(rows));
      std::memcpy(buffer->data() + static_cast<size_t>(i) * size, &id, size);
    }
    return Keep(std::move(buffer), &inputs_);
  }
  const float* Floats(int64_t count) {
    return static_cast<const float*>(In(DType::kFloat32, count));
  }
  void* Out(DType dtype, int64_t count) { return Out(Format(dtype), count); }
  void* Out(const Format& format, int64_t count) {  // Format() for bytes
    formats_.push_back(format);
    const size_t size = format.size;
    return Keep(New(static_cast<size_t>(count) * size, misalign_ * size), &outputs_);
  }

  // Runs it with each number of threads, over two different kinds of dirt: all outputs are written,
  // and come out the same; inputs and what lies around them stay.
  template <class Body>
  void Run(const Body& body, Digest* digest) {
    std::vector<std::string> before, expected;
    for (const auto& buffer : inputs_) before.emplace_back(buffer->data(), buffer->bytes());
    bool first = true;
    for (const int threads : {1, 2, 3, 8}) {
      SetNumThreads(threads);
      for (const auto& buffer : outputs_) {
        std::memset(buffer->data(), first ? 0xff : 0x5a, buffer->bytes());
      }
      body();
      Check(before, first ? nullptr : &expected, threads);
      if (first) {
        for (const auto& buffer : outputs_) expected.emplace_back(buffer->data(), buffer->bytes());
      }
      first = false;
    }
    for (size_t i = 0; i < expected.size(); ++i) digest->Add(expected[i], formats_[i]);
  }

 private:
  using Buffers = std::vector<std::unique_ptr<Buffer>>;

  std::unique_ptr<Buffer> New(size_t bytes, size_t offset) {
    return std::make_unique<Buffer>(bytes, offset);
  }
  static char* Keep(std::unique_ptr<Buffer> buffer, Buffers* where) {
    where->push_back(std::move(buffer));
    return where->back()->data();
  }
  void Check(const std::vector<std::string>& before, const std::vector<std::string>* expected,
             int threads) const {
    const std::string where = name_ + ", " + std::to_string(threads) + " threads: ";
    for (size_t i = 0; i < inputs_.size(); ++i) {
      if (!inputs_[i]->FrontIsWhole())
        Fail(where + "written in front of input " + std::to_string(i));
      if (std::memcmp(inputs_[i]->data(), before[i].data(), before[i].size()) != 0) {
        Fail(where + "input " + std::to_string(i) + " changed");
      }
    }
    for (size_t i = 0; i < outputs_.size(); ++i) {
      if (!outputs_[i]->FrontIsWhole()) {
        Fail(where + "written in front of output " + std::to_string(i));
      }
      if (expected != nullptr &&
          std::memcmp(outputs_[i]->data(), (*expected)[i].data(), outputs_[i]->bytes()) != 0) {
        Fail(where + "output " + std::to_string(i) + " not all written, or not the same");
      }
    }
  }

  std::string name_;
  Random random_;
  size_t misalign_;
  bool specials_;
  Buffers inputs_, outputs_;
  std::vector<Format> formats_;  // of the outputs
};

}  // namespace sanitize
}  // namespace paddle_fused
