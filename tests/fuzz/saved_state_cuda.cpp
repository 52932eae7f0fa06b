// SPDX-License-Identifier: Apache-2.0
// Saved states of the Cuda backend, whose kernels run on the host (tests/cuda/emulated). An input
// is four bytes, and then a state:
//
//   byte 0     which of cases() it is for
//   byte 1     0: contents, 1: description and contents, else the whole; what is missing is put
//              before, with a checksum that is right
//   bytes 2-3  a number: what is done to the loaded sequence
//
// A state is mostly tiles, and tiles are mostly zeros: in an input 0xa5 N stands for 4 N zeros,
// 0xa5 0 for the byte 0xa5.
//
// A loaded sequence can be read. For a quarter of the numbers it must save and load to the same
// bytes, and both copies must go on alike; after an error a sequence is as it was. The cache has
// another sequence, which nothing of this changes. In the end nothing is left of the others. What
// runs kernels takes a hundred times as long as reading a state: libFuzzer does it for a part of
// the inputs.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "fuzz.hpp"
#include "lowrankkv/cuda/presets.cuh"

namespace fuzz {
namespace {

using namespace lowrankkv;

constexpr CacheShape kShape{4, 2, 16};
constexpr int kRank = 8;

/// The kernels of these caches: fewer take less time to compile.
struct SmallSet : KernelSet {
  static constexpr bool bf16 = false, rope_pre = false, full_rows_8 = false;
  static constexpr int head_dim = kShape.head_dim, max_rank = 16, max_code_units = 4;
};
struct WholeSet : SmallSet {
  static constexpr bool rope_pre = true, full_rows_8 = true;
};
using Small = CudaWith<SmallSet>;
using Whole = CudaWith<WholeSet>;

CacheConfig config(bool everything) {
  CacheConfig all{.shape = kShape,
                  .max_sequences = 4,
                  .max_tokens = 48,
                  .full_type = DType::f16,
                  .flush_interval = 4,
                  .publish_interval = 6};
  if (everything) {
    all.rope.keys = Rope::pre;
    all.keep_residuals = true;
    all.full_row_bits = 8;
  }
  return all;
}

/// Maps onto the first channels; those of joint values onto the sums of all heads' channels.
LayerBasis basis(bool joint, bool coded) {
  const int dim = kShape.head_dim;
  LayerBasis maps;
  for (int i = 0; i < kShape.num_kv_heads; ++i) {
    HeadBasis head;
    head.key_rank = head.value_rank = kRank;
    head.key_down.assign(static_cast<std::size_t>(dim * kRank), 0.0F);
    for (int channel = 0; channel < kRank; ++channel)
      head.key_down[static_cast<std::size_t>(channel * kRank + channel)] = 1.0F;
    head.value_down = head.key_down;
    head.key_threshold = head.value_threshold = std::numeric_limits<float>::infinity();
    if (joint) {
      for (float& value : head.value_down) value *= std::sqrt(1.0F / kShape.num_kv_heads);
    }
    if (coded) {
      head.key_bits.assign(kRank, 4);
      head.value_bits.assign(kRank, 2);
      head.key_rms.assign(kRank, 1.0F);
      head.value_rms.assign(kRank, 1.0F);
    }
    maps.heads.push_back(std::move(head));
  }
  return maps;
}

/// Small windows, so that a few tokens fill every kind of row.
template <class Policy>
void make_small(Policy&) {}
inline void make_small(FrequentDirections& updater) { updater.chunk_length = 8; }
inline void make_small(KeepFull& policy) { policy.recent = 4; }
inline void make_small(SinkRecent& policy) { policy = {2, 4}; }
inline void make_small(HeavyHitters& policy) { policy = {0.5F, 0, 4}; }
inline void make_small(ResidualOutliers& policy) { policy.share = 0.2F; }
template <class... Members>
void make_small(Compose<Members...>& policy) {
  std::apply([](auto&... members) { (make_small(members), ...); }, policy.members);
}

constexpr std::byte kZeros{0xa5};
constexpr std::size_t kWord = 4;

/// The state that an input stands for.
Bytes expanded(Input input) {
  constexpr std::size_t kMost = std::size_t{1} << 17;  // more than any state of these caches
  Bytes bytes;
  for (std::size_t at = 0; at < input.size() && bytes.size() < kMost; ++at) {
    if (input[at] != kZeros || at + 1 == input.size()) {
      bytes.push_back(input[at]);
      continue;
    }
    const auto words = std::to_integer<std::size_t>(input[++at]);
    if (words == 0) bytes.push_back(kZeros);
    bytes.resize(bytes.size() + words * kWord);
  }
  return bytes;
}
/// An input that stands for a state.
Bytes shortened(Input state) {
  Bytes bytes;
  for (std::size_t at = 0; at < state.size();) {
    const auto end = std::find_if(state.begin() + static_cast<std::ptrdiff_t>(at), state.end(),
                                  [](std::byte byte) { return byte != std::byte{0}; });
    const auto zeros = static_cast<std::size_t>(end - state.begin()) - at;
    if (const std::size_t words = std::min<std::size_t>(zeros / kWord, 255); words > 0) {
      bytes.insert(bytes.end(), {kZeros, static_cast<std::byte>(words)});
      at += words * kWord;
      continue;
    }
    bytes.push_back(state[at]);
    if (state[at++] == kZeros) bytes.push_back(std::byte{0});
  }
  return bytes;
}

/// One cache and what is tried on it.
class Case {
 public:
  virtual ~Case() = default;
  virtual bool accepts(int form, int work, Input state) = 0;
  virtual Bytes seed() = 0;
};

template <class Cache>
class CaseOf : public Case {
 public:
  static constexpr bool joint = std::is_same_v<decltype(Cache::PolicySet::basis), JointValues>;
  static constexpr bool coded =
      std::is_same_v<decltype(Cache::PolicySet::quantizer), TransformCode>;

  explicit CaseOf(bool everything) {
    typename Cache::PolicySet policies;
    make_small(policies.updater);
    make_small(policies.token_policy);
    cache_ = std::make_unique<Cache>(config(everything), basis(joint, coded), policies);
    // A row has one number that is not zero: states are short.
    rows_.assign(static_cast<std::size_t>(kTokens * kShape.num_qo_heads * kShape.head_dim), 0.0F);
    for (int row = 0; row < kTokens * kShape.num_qo_heads; ++row) {
      const int token = row / kShape.num_kv_heads, channel = token * 5 % kShape.head_dim;
      rows_[static_cast<std::size_t>(row * kShape.head_dim + channel)] = token % 3 == 0 ? -1 : 1;
    }
    header_ = saved_of_new();
    cache_->create(kOther);
    for (int token = 0; token < 13; ++token) append(kOther, token);
    other_ = save(kOther);
    pages_ = cache_->pool().allocator().num_free();
    memory_ = cache_->memory().total();
  }

  bool accepts(int form, int work, Input state) override {
    const Bytes bytes = form > 1 ? expanded(state) : framed(form, expanded(state));
    try {
      cache_->load(0, bytes);
    } catch (const Error&) {
      require(!cache_->contains(0), "a state that is refused leaves no sequence");
      check_rest(bytes);
      return false;
    }
    if (chosen(bytes, 8)) static_cast<void>(answers(0));
    if (work >= kGoOn && chosen(bytes, 32)) {
      const Bytes saved = save(0);
      require(saved.size() == cache_->save_bytes(0), "save() writes save_bytes() bytes");
      try {
        cache_->load(1, saved);
      } catch (const Error& error) {
        broken(std::string("what was saved is refused: ") + error.what());
      }
      require(save(1) == saved, "a copy of a copy is the copy");
      go_on(work);
    }
    for (const SequenceId seq : {0, 1, 2}) {
      if (cache_->contains(seq)) cache_->erase(seq);
    }
    check_rest(bytes);
    return true;
  }

  /// The contents of a sequence of 19 tokens.
  Bytes seed() override {
    cache_->create(0);
    for (int token = 0; token < 19; ++token) append(0, token);
    if (cache_->config().rope.keys == Rope::pre) cache_->shift_positions(0, 5, 3);
    const Bytes bytes = save(0);
    cache_->erase(0);
    return shortened(Input(bytes).subspan(header_.size()));
  }

 private:
  /// From this number on, what goes on after a load is tried.
  static constexpr int kGoOn = 0xc000;
  static constexpr std::size_t kFrame = 24;  // name, size, checksum
  static constexpr int kTokens = 32;
  static constexpr SequenceId kOther = 9;

  const float* row(int token) const {
    return rows_.data() + token * kShape.num_kv_heads * kShape.head_dim;
  }
  KeyView keys(int token) const { return {row(token), 1, kShape.num_kv_heads, kShape.head_dim}; }
  ValueView values(int token) const {
    return {row(token + 3), 1, kShape.num_kv_heads, kShape.head_dim};
  }
  QueryView queries() const { return {rows_.data(), 1, kShape.num_qo_heads, kShape.head_dim}; }
  void append(SequenceId seq, int token) {
    cache_->append_maintained(seq, keys(token), values(token));
  }
  /// True; with libFuzzer for one state in `of` alone.
  static bool chosen([[maybe_unused]] const Bytes& state, [[maybe_unused]] std::uint64_t of) {
#if defined(LOWRANKKV_LIBFUZZER)
    return checksum(state) % of == 0;
#else
    return true;
#endif
  }
  Bytes save(SequenceId seq) const {
    Bytes bytes(cache_->save_bytes(seq));
    bytes.resize(cache_->save(seq, bytes));
    return bytes;
  }
  /// The frame and the description of this cache's layer.
  Bytes saved_of_new() {
    cache_->create(0);
    Bytes bytes = save(0);
    cache_->erase(0);
    std::uint64_t count = 0;
    std::memcpy(&count, bytes.data() + kFrame, sizeof count);
    bytes.resize(kFrame + sizeof count * (1 + static_cast<std::size_t>(count)));
    return bytes;
  }
  Bytes framed(int form, const Bytes& state) const {
    Bytes bytes(header_.begin(), form == 0 ? header_.end() : header_.begin() + kFrame);
    bytes.insert(bytes.end(), state.begin(), state.end());
    const std::uint64_t frame[2] = {bytes.size(), checksum(Input(bytes).subspan(kFrame))};
    std::memcpy(bytes.data() + kFrame - sizeof frame, frame, sizeof frame);
    return bytes;
  }
  void check_rest(const Bytes& bytes) const {
    require(cache_->pool().allocator().num_free() == pages_, "no page is left of the sequences");
    require(cache_->memory().total() == memory_, "no memory is left of the sequences");
    if (chosen(bytes, 32)) require(save(kOther) == other_, "another sequence is as it was");
  }

  /// All that can be read of a sequence.
  std::vector<float> answers(SequenceId seq) const {
    const std::int64_t tokens = cache_->num_tokens(seq);
    const std::size_t elements =
        static_cast<std::size_t>(tokens * kShape.num_kv_heads * kShape.head_dim);
    std::vector<float> all(2 * elements);
    cache_->reconstruct(seq, 0, {all.data(), tokens, kShape.num_kv_heads, kShape.head_dim},
                        {all.data() + elements, tokens, kShape.num_kv_heads, kShape.head_dim});
    std::vector<RowState> states(static_cast<std::size_t>(tokens));
    for (int head = 0; head < kShape.num_kv_heads; ++head) cache_->row_states(seq, head, 0, states);
    if (cache_->tail_length(seq) == 0) return all;
    std::vector<float> out(static_cast<std::size_t>(kShape.num_qo_heads * kShape.head_dim)),
        lse(static_cast<std::size_t>(kShape.num_qo_heads));
    cache_->attend(seq, queries(), {out.data(), 1, kShape.num_qo_heads, kShape.head_dim},
                   LseView(lse.data(), 1, kShape.num_qo_heads));
    all.insert(all.end(), out.begin(), out.end());
    all.insert(all.end(), lse.begin(), lse.end());
    return all;
  }
  /// Does the same to both copies. If it is refused, both are as they were, and it returns false.
  template <class Work>
  bool both(Work&& work) {
    const Bytes before = save(0);
    int refused = 0;
    for (const SequenceId seq : {0, 1}) {
      try {
        work(seq);
      } catch (const Error&) {
        require(save(seq) == before, "a call that is refused changes nothing");
        ++refused;
      }
    }
    require(refused != 1, "copies refuse the same");
    return refused == 0;
  }
  void go_on(int work) {
    const auto same = [&] {
      const std::vector<float> a = answers(0), b = answers(1);
      require(std::ranges::equal(a, b,
                                 [](float x, float y) {
                                   return std::bit_cast<std::uint32_t>(x) ==
                                          std::bit_cast<std::uint32_t>(y);
                                 }),
              "copies answer alike");
      require(save(0) == save(1), "copies are saved alike");
    };
    same();
    const std::int64_t place = work >> 6 & 255;  // a token, or a distance
    if ((work & 1) != 0)
      both([&](SequenceId seq) { cache_->remove(seq, place % 32, 1 + place / 32); });
    if ((work & 2) != 0)
      both([&](SequenceId seq) { static_cast<void>(cache_->truncate(seq, place % 40)); });
    if ((work & 4) != 0)
      both([&](SequenceId seq) { cache_->shift_positions(seq, place % 16, place / 16 - 8); });
    if ((work & 8) != 0) both([&](SequenceId seq) { cache_->maintain(seq); });
    if ((work & 16) != 0) {  // a fork that goes on alone leaves the other as it is
      const Bytes before = save(0);
      cache_->fork(0, 2);
      try {
        for (int token = 0; token < 6; ++token) append(2, token);
        static_cast<void>(answers(2));
      } catch (const Error&) {
      }
      require(save(0) == before, "a fork leaves its source as it was");
    }
    if ((work & 32) != 0) {
      for (int token = 0; token < 5; ++token) {
        if (!both([&](SequenceId seq) { append(seq, token); })) break;
      }
    }
    same();
  }

  std::unique_ptr<Cache> cache_;
  std::vector<float> rows_;
  Bytes header_, other_;
  std::int64_t pages_ = 0;
  std::size_t memory_ = 0;
};

/// Plain caches, and ones with everything that a configuration can have.
const std::vector<std::unique_ptr<Case>>& cases() {
  static const auto all = [] {
    std::vector<std::unique_ptr<Case>> list;
    list.push_back(std::make_unique<CaseOf<FullKV<Small>>>(false));
    list.push_back(std::make_unique<CaseOf<OjaKVv2<Small>>>(false));
    list.push_back(std::make_unique<CaseOf<SubSpaceA<Small>>>(false));
    list.push_back(std::make_unique<CaseOf<StarKVH2O<Small>>>(false));
    list.push_back(std::make_unique<CaseOf<H2O<Whole>>>(true));
    list.push_back(std::make_unique<CaseOf<OjaKVv2<Whole>>>(true));
    list.push_back(std::make_unique<CaseOf<Budgeted<Whole>>>(true));
    return list;
  }();
  return all;
}

}  // namespace

bool accepts(Input input) {
  if (input.size() < 4) return false;
  const auto byte = [&](std::size_t at) { return std::to_integer<int>(input[at]); };
  Case& chosen = *cases()[static_cast<std::size_t>(byte(0)) % cases().size()];
  return chosen.accepts(byte(1), byte(2) | byte(3) << 8, input.subspan(4));
}

std::vector<Seed> seeds() {
  std::vector<Seed> all;
  for (std::size_t i = 0; i < cases().size(); ++i) {
    Bytes bytes{std::byte(i), std::byte{0}, std::byte(0x20 | (1U << i % 5)), std::byte{0xc3}};
    const Bytes contents = cases()[i]->seed();
    bytes.insert(bytes.end(), contents.begin(), contents.end());
    all.push_back({"cache_" + std::to_string(i), bytes});
  }
  return all;
}

}  // namespace fuzz
