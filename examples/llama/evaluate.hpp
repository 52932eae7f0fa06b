// SPDX-License-Identifier: Apache-2.0
// What the programs measure: calibration moments, bits per byte, divergence from FullKV, retrieval.
// All through the public cache API. Speed: speed.hpp.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "kv_store.hpp"
#include "model.hpp"
#include "ruler.hpp"
#include "samples.hpp"
#include "tokenizer.hpp"

namespace llama {

class Checkpoint;

/// A model, its tokenizer and the threads both work on. Texts begin with the BOS that the
/// tokenizer's post-processor puts there, or with none if it puts none; where the file has no
/// post-processor, with config.json's.
struct Engine {
  Engine(const std::string& folder, int num_threads);
  std::shared_ptr<lowrankkv::cpu::ThreadPool> threads;
  Tokenizer tokenizer;
  Model model;
};

/// Tokens a second, of the prompt or of decode steps.
struct Speed {
  double tokens_per_second = 0.0;  ///< by the median of `seconds`; 0: not measured
  /// How many times as fast as FullKV, the median over the rounds of both; 0 without FullKV.
  double times_full = 0.0;
  std::vector<double> seconds;  ///< of every round
};

/// How a text is cut into windows. Each begins with BOS, if the model has one. All of its tokens
/// but the last `decoded` are prefilled and compressed, the rest teacher-forced in steps of 16
/// through append and attend. Scored is what these steps predict of the window: decoded - 1
/// positions, less boundaries of documents.
struct WindowShape {
  std::int64_t tokens = 1024;  ///< of a window, BOS included; at most what the model takes
  std::int64_t decoded = 768;  ///< 2 to tokens - 1
};

/// KL(FullKV || method) of the next-token distribution at scored positions, in nats.
struct Divergence {
  double mean = 0.0;
  double median = 0.0;  ///< and the next, by nearest rank: the least value that 50 % do not exceed
  double p999 = 0.0;    ///< 99.9th percentile; the largest of fewer than 1000 positions
  double top1 = 0.0;    ///< fraction of positions at which both have the same most likely token
  std::int64_t positions = 0;
};

/// One row of every table: a method at a ratio, and what was measured of it. Only what was measured
/// is written.
struct Row {
  std::string method;
  double ratio = 1.0;            ///< the method's knob; 1 for methods without one
  std::string knob;              ///< what `ratio` means; empty for methods without one
  double bytes_per_token = 0.0;  ///< everything that belongs to the sequence, over its tokens
  double ratio_measured = 0.0;   ///< the same against f16 K and V
  std::int64_t context = 0;      ///< tokens at which the bytes were measured
  std::map<std::string, double> bits_per_byte;  ///< by text
  double text_ratio_measured = 0.0;  ///< ratio_measured at the end of the windows of bits_per_byte
  WindowShape window;                ///< of those
  std::map<std::string, int> windows;            ///< how many, by text
  std::map<std::string, Divergence> divergence;  ///< by text
  Divergence all_texts;                          ///< of the positions of all texts of divergence
  std::string retrieval_set;                     ///< which samples exact_match is of
  std::map<std::string, double> exact_match;     ///< by task, a fraction
  std::map<std::string, int> samples;            ///< by task
  std::map<std::string, std::string>
      outcomes;  ///< by task: 1 or 0 for every sample, in the order of the set
  std::map<std::string, double> string_match;               ///< by task of RULER, a fraction
  std::map<std::string, std::vector<double>> match_scores;  ///< by task of RULER, of every sample
  std::int64_t prompt_tokens = 0;  ///< of the prompt whose speed was measured
  Speed prefill, decode;           ///< decode: single tokens behind that prompt
  /// The most that ratio_measured was of any prompt, window or text, and the tokens of that one.
  double largest_ratio_measured = 0.0;
  std::int64_t largest_context = 0;
  double mean_exact_match() const;
  double mean_string_match() const;
  /// How much more than `ratio` that was: 0.6 where 0.08 was measured and 0.05 asked for. 0 if not
  /// more, and for methods without a ratio.
  double excess() const;
};

/// A method under test and its store.
struct Contender {
  MethodOptions options;
  std::unique_ptr<KvStore> store;
  Row row;
};
/// Every method at every ratio (methods without a ratio once); no ratios: each method at those of
/// its MethodInfo.
std::vector<Contender> make_contenders(const Engine& engine, const std::vector<std::string>& names,
                                       const std::vector<double>& ratios, MethodOptions options,
                                       std::int64_t max_tokens, const Calibration& calibration);

/// Writes the bytes of the sequence that is being measured into the row, its excess included.
void note_memory(const Engine& engine, Contender& contender);
/// Writes only the excess: of a sequence whose bytes are those of an earlier point in the row.
void note_excess(const Engine& engine, Contender& contender);

/// A prompt's ids: BOS once, whether the text has it or not, and the text. Throws if there is no
/// token.
std::vector<std::int32_t> encode_prompt(const Engine& engine, std::string_view text);
/// Text to ids; the separator of documents (the byte 0x1e and a newline) becomes the BOS token.
std::vector<std::int32_t> encode_documents(const Engine& engine, const std::string& text);
std::string read_text(const std::string& path);
/// Reads back bundles: none, one of either form of the keys, or one of each.
Calibration load_bases(const Engine& engine, const std::vector<std::string>& paths);

/// A window of tokens with `copies` tokens more: spans of its first `context` tokens. Reading them
/// a second time is retrieval, and text alone has little.
std::vector<std::int32_t> with_copies(std::vector<std::int32_t> window, std::size_t context,
                                      std::size_t copies, std::mt19937_64& random);

/// The tokens of a calibration: `max_tokens` of them at most, the same share of each text, from its
/// beginning on; BOS stands between two texts.
std::vector<std::int32_t> calibration_tokens(const Engine& engine,
                                             const std::vector<std::string>& texts,
                                             std::int64_t max_tokens);

/// Statistics of the first `max_tokens` tokens of a text, in windows that each begin with BOS and
/// end with spans of themselves (up to 512 tokens), read again. Windows of `window` tokens give
/// moments and coding statistics: keys are rotated by their position, and bases must have seen the
/// positions at which they will be used. Every second window is half as long and gives coding
/// statistics alone; about two thirds of the tokens thus enter the moments.
/// @param forms  the forms of the keys that statistics are of: one, or each once; one pass serves
/// both
/// @param metric  output: as above. loss: moments alone, of whole windows without spans read again;
/// use_loss_metric() adds coding statistics
Calibration calibrate(
    const Engine& engine, const std::string& text, std::int64_t max_tokens, int window,
    const std::vector<lowrankkv::Rope>& forms = {lowrankkv::Rope::post},
    lowrankkv::calibrate::CodingMetric metric = lowrankkv::calibrate::CodingMetric::output);
/// The same of all of `ids`. With a checkpoint it goes on where that stands, and gives the same
/// statistics to the bit; the file is written between two windows, and at the end.
Calibration calibrate(const Engine& engine, const std::vector<std::int32_t>& ids, int window,
                      const std::vector<lowrankkv::Rope>& forms,
                      lowrankkv::calibrate::CodingMetric metric, Checkpoint* checkpoint);

/// Statistics from the projections' weights alone, without a text: of queries and keys before RoPE,
/// and of values, for inputs whose channels are independent and of unit size before the gain of
/// their norm. No statistics for transform coding.
std::vector<lowrankkv::calibrate::LayerMoments> calibrate_from_weights(const Engine& engine);

/// Bits per byte of windows of a text. Fills row.bits_per_byte[name] of all. Throws
/// std::runtime_error if the text is shorter than a window, or the shape is none.
void measure_bits_per_byte(const Engine& engine, std::vector<Contender>& contenders,
                           const std::string& name, const std::string& text, int max_windows,
                           const WindowShape& shape = {});

/// A text and what it is called in results.
struct NamedText {
  std::string name;
  std::string text;
};
/// The texts of files, and of the *.txt of folders, called as their files without extension. Throws
/// std::runtime_error if two have one name, or a folder has none.
std::vector<NamedText> read_texts(const std::vector<std::string>& paths);

/// Divergence from FullKV on windows of texts, of each text and of the positions of all together;
/// bits per byte, which the same pass gives, too. The first contender of method FullKV, which must
/// be there, is the reference: it decodes once, a step ahead of all others, so that logits of no
/// more than 16 positions are held. Fills row.divergence, all_texts and bits_per_byte of all.
/// Throws as measure_bits_per_byte().
void measure_divergence(const Engine& engine, std::vector<Contender>& contenders,
                        const std::vector<NamedText>& texts, int max_windows,
                        const WindowShape& shape = {});

/// Tokens of the longest prompt with its answer, of RULER's at most. No more than the model has
/// positions: longer samples are refused when they are measured.
std::int64_t longest_sample(const Engine& engine, const std::vector<Sample>& samples);
std::int64_t longest_sample(const Engine& engine, const std::vector<RulerSample>& samples);

/// Exact match: the prompt without its last `tail` tokens is prefilled exactly and compressed, the
/// tail and the answer are teacher-forced; a sample counts when every answer token is the argmax.
/// One exact prefill serves all contenders.
/// @param set  what the samples are called in results
void measure_retrieval(const Engine& engine, std::vector<Contender>& contenders,
                       const std::string& set, const std::vector<Sample>& samples, int tail);

/// RULER's scores: the prompt without its last `tail` tokens is prefilled exactly and compressed,
/// the tail is decoded, and an answer generated, greedily, of at most as many tokens as RULER
/// takes. A sample's score is that of string_match(); generation ends where it cannot change any
/// more. One exact prefill serves all contenders. Throws std::runtime_error if a prompt and its
/// answer do not fit into the model's context, before anything is measured.
/// @param set  what the samples are called in results
void measure_ruler(const Engine& engine, std::vector<Contender>& contenders, const std::string& set,
                   const std::vector<RulerSample>& samples, int tail);

struct Sampling {
  float temperature = 0.0F;  ///< 0: greedy
  float top_p = 1.0F;
  std::uint64_t seed = 0;
};
/// Generates up to max_tokens ids after `prompt`; stops at an end token. on_token is called with
/// each, at_end while the sequence is still there.
std::vector<std::int32_t> generate(const Engine& engine, KvStore& store,
                                   const std::vector<std::int32_t>& prompt, int max_tokens,
                                   const Sampling& sampling,
                                   const std::function<void(std::int32_t)>& on_token,
                                   const std::function<void()>& at_end = {});

/// Exact prefill of `tokens` into an empty sequence of `store`; returns the hidden states.
std::vector<float> prefill(const Engine& engine, KvStore& store, lowrankkv::SequenceId seq,
                           const std::vector<std::int32_t>& tokens);
/// One decode step of some tokens; returns the hidden states.
std::vector<float> decode(const Engine& engine, KvStore& store, lowrankkv::SequenceId seq,
                          const std::vector<std::int32_t>& tokens);

}  // namespace llama
