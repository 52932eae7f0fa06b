// SPDX-License-Identifier: Apache-2.0
// After any error the cache is as it was: presets by what they do with tokens.
#include "compressed_kv_cache/undo_cpu.hpp"

using namespace lowrankkv;

TEST_CASE("full rows") { undo::check_cache<FullKV<>>(undo::config(), undo::basis()); }
TEST_CASE("sinks and a window") {
  CacheConfig config = undo::config();
  undo::check_cache<StreamingLLM<>>(config, undo::basis());
  config.rope.keys = Rope::pre;
  undo::check_cache<StaticPCAHybrid<>>(config, undo::basis());
}
TEST_CASE("a prompt's best rows, heavy hitters") {
  CacheConfig config = undo::config();
  undo::check_cache<SnapKVOnly<>>(config, undo::basis());
  config.full_row_bits = 8;
  config.keep_residuals = true;
  undo::check_cache<H2O<>>(config, undo::basis());
}
TEST_CASE("whole stacks") {
  undo::check_stack<FullKV<>>(undo::config(), undo::basis());
  undo::check_stack<Budgeted<>>(undo::config(), undo::basis_with_bits());
}
