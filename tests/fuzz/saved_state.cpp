// SPDX-License-Identifier: Apache-2.0
// Saved states of the CPU backend. An input is four bytes, and then a state:
//
//   byte 0     which of cases() it is for
//   byte 1     0: contents, 1: description and contents, else the whole; what is missing is put
//              before, with a checksum that is right
//   bytes 2-3  a number: what is done to the loaded sequence
//
// A loaded sequence can be read. For a quarter of the numbers it must save and load to the same
// bytes, and both copies must go on alike; after an error a sequence is as it was. In the end
// nothing is left of them.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <tuple>
#include <type_traits>

#include "fuzz.hpp"
#include "lowrankkv/presets.hpp"
#include "support/random_layer.hpp"

namespace fuzz {
namespace {

using namespace lowrankkv;

constexpr CacheShape kShape{4, 2, 8};
constexpr int kRank = 4;

CacheConfig config(bool everything) {
  CacheConfig all{.shape = kShape,
                  .max_sequences = 4,
                  .max_tokens = 32,
                  .page_bytes = 256,
                  .flush_interval = 4,
                  .publish_interval = 6};
  if (everything) {
    all.rope.keys = Rope::pre;
    all.keep_residuals = true;
    all.full_row_bits = 8;
  }
  return all;
}

/// Maps for every preset: joint values, bits of channels.
LayerBasis basis(bool joint, bool coded) {
  support::Random random(5);
  LayerBasis maps = support::random_basis(random, kShape, {}, kRank, kRank);
  const auto columns =
      support::random_orthonormal(random, kShape.num_kv_heads * kShape.head_dim, kRank);
  for (int i = 0; i < kShape.num_kv_heads; ++i) {
    HeadBasis& head = maps.heads[static_cast<std::size_t>(i)];
    if (joint) {
      head.value_rank = kRank;
      head.value_down =
          support::row_major(columns.middleRows(i * kShape.head_dim, kShape.head_dim));
    }
    if (coded) {
      head.key_bits.assign(static_cast<std::size_t>(head.key_rank), 4);
      head.value_bits.assign(static_cast<std::size_t>(head.value_rank), 3);
      head.key_rms.assign(static_cast<std::size_t>(head.key_rank), 1.0F);
      head.value_rms.assign(static_cast<std::size_t>(head.value_rank), 1.0F);
    }
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
    std::mt19937 random(1);
    std::uniform_real_distribution<float> uniform(-1.0F, 1.0F);
    rows_.resize(static_cast<std::size_t>(64 * kShape.num_qo_heads * kShape.head_dim));
    for (float& value : rows_) value = uniform(random);
    header_ = saved_of_new();
  }

  bool accepts(int form, int work, Input state) override {
    const bool whole = form > 1;
    const Bytes bytes = whole ? Bytes(state.begin(), state.end()) : framed(form, state);
    try {
      cache_->load(0, bytes);
    } catch (const Error&) {
      require(!cache_->contains(0), "a state that is refused leaves no sequence");
      check_empty();
      return false;
    }
    static_cast<void>(answers(0));
    if (work >= kGoOn) {
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
    check_empty();
    return true;
  }

  /// The contents of a sequence after a prompt and some decoded tokens.
  Bytes seed() override {
    cache_->create(0);
    cache_->ingest(0, keys(10), values(10), queries(10));
    if (cache_->config().rope.keys == Rope::pre) cache_->shift_positions(0, 5, 3);
    for (int token = 0; token < 7; ++token) append(0, token);
    const Bytes bytes = save(0);
    cache_->erase(0);
    return {bytes.begin() + static_cast<std::ptrdiff_t>(header_.size()), bytes.end()};
  }

 private:
  /// From this number on, what goes on after a load is tried, which takes ten times as long.
  static constexpr int kGoOn = 0xc000;
  static constexpr std::size_t kFrame = 24;  // name, size, checksum

  KeyView keys(int n, int at = 0) const {
    return {rows_.data() + at * 16, n, kShape.num_kv_heads, kShape.head_dim};
  }
  ValueView values(int n, int at = 0) const {
    return {rows_.data() + at * 16 + 64, n, kShape.num_kv_heads, kShape.head_dim};
  }
  QueryView queries(int n) const { return {rows_.data(), n, kShape.num_qo_heads, kShape.head_dim}; }
  void append(SequenceId seq, int token) {
    cache_->append_maintained(seq, keys(1, token + 20), values(1, token + 20));
  }
  Bytes save(SequenceId seq) const {
    const std::size_t size = cache_->save(seq, buffer_);
    return {buffer_.begin(), buffer_.begin() + static_cast<std::ptrdiff_t>(size)};
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
  Bytes framed(int form, Input state) const {
    Bytes bytes(header_.begin(), form == 0 ? header_.end() : header_.begin() + kFrame);
    bytes.insert(bytes.end(), state.begin(), state.end());
    const std::uint64_t frame[2] = {bytes.size(), checksum(Input(bytes).subspan(kFrame))};
    std::memcpy(bytes.data() + kFrame - sizeof frame, frame, sizeof frame);
    return bytes;
  }
  void check_empty() const {
    const auto& pages = cache_->pool().allocator();
    require(pages.num_free() == pages.num_pages(), "no page is left of erased sequences");
    require(cache_->memory().total() == 0, "no memory is left of erased sequences");
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
    std::vector<float> out(rows_.size() / 64), lse(static_cast<std::size_t>(kShape.num_qo_heads));
    const OutputView output{out.data(), 1, kShape.num_qo_heads, kShape.head_dim};
    cache_->attend(seq, queries(1), output, LseView(lse.data(), 1, kShape.num_qo_heads));
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
    const std::int64_t place = work >> 7 & 127;  // a token, or a distance
    if ((work & 1) != 0)
      both([&](SequenceId seq) { cache_->remove(seq, place % 32, 1 + place / 32); });
    if ((work & 2) != 0)
      both([&](SequenceId seq) { static_cast<void>(cache_->truncate(seq, place % 40)); });
    if ((work & 4) != 0)
      both([&](SequenceId seq) { cache_->shift_positions(seq, place % 16, place / 16 - 8); });
    if ((work & 8) != 0)
      both([&](SequenceId seq) { cache_->divide_positions(seq, place % 16, 3, 1 + place / 16); });
    if ((work & 16) != 0) both([&](SequenceId seq) { cache_->maintain(seq); });
    if ((work & 32) != 0) {  // a fork that goes on alone leaves the other as it is
      const Bytes before = save(0);
      cache_->fork(0, 2);
      try {
        for (int token = 0; token < 6; ++token) append(2, token);
        static_cast<void>(answers(2));
      } catch (const Error&) {
      }
      require(save(0) == before, "a fork leaves its source as it was");
    }
    if ((work & 64) != 0) {
      for (int token = 0; token < 5; ++token) {
        if (!both([&](SequenceId seq) { append(seq, token); })) break;
      }
      if (cache_->config().keep_residuals) both([&](SequenceId seq) { certify(seq); });
    }
    same();
  }
  void certify(SequenceId seq) const {
    if (cache_->tail_length(seq) == 0) return;
    std::vector<float> out(rows_.size() / 64), lse(static_cast<std::size_t>(kShape.num_qo_heads));
    const LseView sums(lse.data(), 1, kShape.num_qo_heads);
    cache_->attend(seq, queries(1), {out.data(), 1, kShape.num_qo_heads, kShape.head_dim}, sums);
    std::vector<Certificate> bounds(static_cast<std::size_t>(kShape.num_qo_heads));
    cache_->certify(seq, queries(1), sums, CertificateView(bounds.data(), 1, kShape.num_qo_heads));
  }

  std::unique_ptr<Cache> cache_;
  std::vector<float> rows_;
  Bytes header_;
  /// Larger than every state of these caches.
  mutable Bytes buffer_ = Bytes(std::size_t{1} << 16);
};

/// All caches, plain ones and ones with everything that a configuration can have.
const std::vector<std::unique_ptr<Case>>& cases() {
  static const auto all = [] {
    std::vector<std::unique_ptr<Case>> list;
    for (const bool everything : {false, true}) {
      list.push_back(std::make_unique<CaseOf<FullKV<>>>(everything));
      list.push_back(std::make_unique<CaseOf<H2O<>>>(everything));
      list.push_back(std::make_unique<CaseOf<StaticPCA<>>>(everything));
      list.push_back(std::make_unique<CaseOf<OjaKVv2<>>>(everything));
      list.push_back(std::make_unique<CaseOf<SubSpaceA<>>>(everything));
      list.push_back(std::make_unique<CaseOf<StarKVH2O<>>>(everything));
      list.push_back(std::make_unique<CaseOf<Budgeted<>>>(everything));
    }
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
    Bytes bytes{std::byte(i), std::byte{0}, std::byte(0x40 | (1U << i % 6)),
                std::byte(i < 2 ? 0xc3 : 3)};
    const Bytes contents = cases()[i]->seed();
    bytes.insert(bytes.end(), contents.begin(), contents.end());
    all.push_back({"cache_" + std::to_string(i), bytes});
  }
  return all;
}

}  // namespace fuzz
