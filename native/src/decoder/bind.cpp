// Python bindings of the decoder: tensors come as DLPack capsules, which are held for as long as it lives.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../bind.hpp"
#include "../memory/dlpack.hpp"
#include "decoder.hpp"

namespace py = pybind11;

namespace {

// Somebody's tensor, kept from being freed.
class HeldTensor {
 public:
  explicit HeldTensor(const py::handle& tensor) {
    const py::object capsule = tensor.attr("__dlpack__")();
    if (!PyCapsule_IsValid(capsule.ptr(), "dltensor")) throw py::value_error("not a DLPack tensor, or one used before");
    managed_ = static_cast<fs::DLManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
    PyCapsule_SetName(capsule.ptr(), "used_dltensor");
  }
  ~HeldTensor() {
    if (managed_ != nullptr && managed_->deleter != nullptr) managed_->deleter(managed_);
  }
  HeldTensor(HeldTensor&& other) noexcept : managed_(std::exchange(other.managed_, nullptr)) {}
  HeldTensor(const HeldTensor&) = delete;
  HeldTensor& operator=(const HeldTensor&) = delete;

  // A vector comes as one row.
  fs::Matrix matrix() const {
    const fs::DLTensor& t = managed_->tensor;
    if (t.device.type != 1) throw py::value_error("the tensor is not in the CPU's memory");
    if (t.dimensions != 1 && t.dimensions != 2)
      throw py::value_error("a tensor of " + std::to_string(t.dimensions) + " dimensions, 1 or 2 expected");
    std::int64_t stride = 1;
    for (int i = t.dimensions; i-- > 0; stride *= t.shape[i])
      if (t.strides != nullptr && t.shape[i] != 1 && t.strides[i] != stride)
        throw py::value_error("the tensor is not contiguous");
    const std::size_t rows = t.dimensions == 2 ? static_cast<std::size_t>(t.shape[0]) : 1;
    const auto columns = static_cast<std::size_t>(t.shape[t.dimensions - 1]);
    return {static_cast<const std::byte*>(t.data) + t.byte_offset, type(), rows, columns};
  }

 private:
  fs::Type type() const {
    const fs::DLDataType dtype = managed_->tensor.dtype;
    if (dtype.lanes == 1 && dtype.code == 2 && dtype.bits == 32) return fs::Type::f32;
    if (dtype.lanes == 1 && dtype.code == 2 && dtype.bits == 16) return fs::Type::f16;
    if (dtype.lanes == 1 && dtype.code == 4 && dtype.bits == 16) return fs::Type::bf16;
    if (dtype.lanes == 1 && dtype.code == 0 && dtype.bits == 8) return fs::Type::i8;
    throw py::value_error("the tensor is not fp32, fp16, bf16 or int8");
  }

  fs::DLManagedTensor* managed_ = nullptr;
};

// A C-contiguous buffer of one kind of number, held while a step reads or writes it.
template <class Number>
class Numbers {
 public:
  Numbers(const py::object& object, const char* name, std::size_t dimensions, bool writable = false) : name_(name) {
    if (object.is_none()) return;
    info_ = py::cast<py::buffer>(object).request(writable);
    if (info_.itemsize != sizeof(Number) || !info_.item_type_is_equivalent_to<Number>())
      throw py::type_error(std::string(name) + ": wrong type of number");
    if (static_cast<std::size_t>(info_.ndim) != dimensions)
      throw py::value_error(std::string(name) + ": " + std::to_string(dimensions) + " dimensions expected");
    py::ssize_t stride = sizeof(Number);
    for (py::ssize_t i = info_.ndim; i-- > 0; stride *= info_.shape[static_cast<std::size_t>(i)])
      if (info_.shape[static_cast<std::size_t>(i)] > 1 && info_.strides[static_cast<std::size_t>(i)] != stride)
        throw py::value_error(std::string(name) + " is not contiguous");
  }
  Number* data() const { return static_cast<Number*>(info_.ptr); }
  std::size_t size(std::size_t dimension = 0) const {
    return info_.ptr == nullptr ? 0 : static_cast<std::size_t>(info_.shape[dimension]);
  }
  void expect(std::size_t dimension, std::size_t count) const {
    if (size(dimension) != count)
      throw py::value_error(std::string(name_) + ": " + std::to_string(count) + " expected, got " +
                            std::to_string(size(dimension)));
  }

 private:
  const char* name_;
  py::buffer_info info_;
};

fs::Type type_named(const std::string& name) {
  if (name == "fp32") return fs::Type::f32;
  if (name == "fp16") return fs::Type::f16;
  if (name == "bf16") return fs::Type::bf16;
  throw py::value_error("dtype " + name + " is not fp32, fp16 or bf16");
}

struct BoundDecoder {
  std::vector<HeldTensor> tensors;  // outlive the decoder, which is declared after them
  std::unique_ptr<fs::Decoder> decoder;

  // A matrix in int8 comes as a tuple with its rows' factors.
  fs::Matrix hold(const py::handle& tensor) {
    if (tensor.is_none()) return {};
    if (py::isinstance<py::tuple>(tensor)) {
      const auto pair = py::cast<py::tuple>(tensor);
      if (pair.size() != 2) throw py::value_error("a matrix in int8 and its factors are two tensors");
      fs::Matrix matrix = keep(pair[0]);
      const fs::Matrix factors = keep(pair[1]);
      if (matrix.type != fs::Type::i8 || factors.type != fs::Type::f32 || factors.rows != 1 ||
          factors.columns != matrix.rows)
        throw py::value_error("a tuple is a matrix in int8 and a factor in fp32 for each of its rows");
      matrix.scales = static_cast<const float*>(factors.data);
      return matrix;
    }
    const fs::Matrix matrix = keep(tensor);
    if (matrix.type == fs::Type::i8) throw py::value_error("a matrix in int8 needs its rows' factors");
    return matrix;
  }

 private:
  fs::Matrix keep(const py::handle& tensor) {
    tensors.emplace_back(tensor);
    return tensors.back().matrix();
  }
};

// In the order of LayerWeights in runtime/llm/model/layers.py.
constexpr fs::Matrix fs::DecoderLayer::*kTensors[] = {
    &fs::DecoderLayer::attention_norm, &fs::DecoderLayer::q,
    &fs::DecoderLayer::k,              &fs::DecoderLayer::v,
    &fs::DecoderLayer::o,              &fs::DecoderLayer::ffn_norm,
    &fs::DecoderLayer::gate,           &fs::DecoderLayer::up,
    &fs::DecoderLayer::down,           &fs::DecoderLayer::q_bias,
    &fs::DecoderLayer::k_bias,         &fs::DecoderLayer::v_bias,
    &fs::DecoderLayer::o_bias,         &fs::DecoderLayer::gate_bias,
    &fs::DecoderLayer::up_bias,        &fs::DecoderLayer::down_bias,
    &fs::DecoderLayer::q_norm,         &fs::DecoderLayer::k_norm,
    &fs::DecoderLayer::attention_output_norm, &fs::DecoderLayer::ffn_output_norm};

fs::RotaryTurns turns_of(const py::object& inverse_frequencies, float factor) {
  const Numbers<float> frequencies(inverse_frequencies, "inverse_frequencies", 1);
  return {{frequencies.data(), frequencies.data() + frequencies.size()}, factor};
}

std::unique_ptr<BoundDecoder> bind(std::size_t hidden_size, std::size_t head_count, std::size_t kv_head_count,
                                   std::size_t head_dim, std::size_t ffn_size, std::size_t vocab_size, float norm_eps,
                                   const py::sequence& inverse_frequencies, const std::vector<float>& rotary_factors,
                                   const py::sequence& layers, const std::vector<std::size_t>& windows,
                                   const std::vector<std::size_t>& turns, const py::object& embedding,
                                   const py::object& final_norm, const py::object& head, float attention_scale,
                                   float attention_softcap, float embedding_scale, float residual_scale, bool gelu,
                                   const std::string& kv_dtype, std::size_t block_count, std::size_t block_tokens,
                                   unsigned threads, const std::string& isa) {
  auto bound = std::make_unique<BoundDecoder>();
  fs::DecoderWeights weights;
  weights.embedding = bound->hold(embedding);
  const std::size_t count = layers.size();
  if (windows.size() != count || turns.size() != count)
    throw py::value_error("windows and turns have one number for each of " + std::to_string(count) + " layers");
  for (const py::handle& item : layers) {
    const auto tensors = py::cast<py::sequence>(item);
    if (tensors.size() != std::size(kTensors))
      throw py::value_error("a layer has " + std::to_string(std::size(kTensors)) + " tensors, got " +
                            std::to_string(tensors.size()));
    fs::DecoderLayer layer;
    for (std::size_t i = 0; i < std::size(kTensors); ++i) layer.*kTensors[i] = bound->hold(tensors[i]);
    layer.window = windows[weights.layers.size()];
    layer.turns = turns[weights.layers.size()];
    weights.layers.push_back(layer);
  }
  weights.final_norm = bound->hold(final_norm);
  weights.head = bound->hold(head);
  if (inverse_frequencies.size() != 2 || rotary_factors.size() != 2)
    throw py::value_error("two sets of frequencies with a factor each are expected");
  fs::DecoderShape shape{hidden_size, head_count, kv_head_count, head_dim, ffn_size, vocab_size, norm_eps,
                         {turns_of(inverse_frequencies[0], rotary_factors[0]),
                          turns_of(inverse_frequencies[1], rotary_factors[1])},
                         block_count, block_tokens, type_named(kv_dtype), attention_scale, attention_softcap,
                         embedding_scale, residual_scale, gelu};
  bound->decoder = std::make_unique<fs::Decoder>(std::move(shape), std::move(weights), threads, isa);
  return bound;
}

void step(BoundDecoder& bound, const py::object& tokens, const py::object& hidden, const py::object& positions,
          const py::object& starts, const py::object& tables, const py::object& logits_rows, const py::object& output) {
  fs::Decoder& decoder = *bound.decoder;
  const Numbers<std::int32_t> token_ids(tokens, "tokens", 1), places(positions, "positions", 1),
      begins(starts, "starts", 1), blocks(tables, "tables", 2), wanted(logits_rows, "logits_rows", 1);
  const Numbers<float> states(hidden, "hidden", 2), result(output, "output", 2, true);
  const std::size_t rows = places.size();
  if (begins.size() == 0) throw py::value_error("starts: at least one expected");
  if (!tokens.is_none()) token_ids.expect(0, rows);
  if (!hidden.is_none()) {
    states.expect(0, rows);
    states.expect(1, decoder.shape().hidden_size);
  }
  blocks.expect(0, begins.size() - 1);
  const bool ends_in_logits = !logits_rows.is_none();
  result.expect(0, ends_in_logits ? wanted.size() : rows);
  result.expect(1, ends_in_logits ? decoder.shape().vocab_size : decoder.shape().hidden_size);
  const fs::DecoderBatch batch{token_ids.data(), states.data(),     places.data(), rows,
                               begins.data(),    begins.size() - 1, blocks.data(), blocks.size(1),
                               ends_in_logits,   wanted.data(),     wanted.size(), result.data()};
  const py::gil_scoped_release released;
  decoder.step(batch);
}

void logits(BoundDecoder& bound, const py::object& hidden, const py::object& output) {
  fs::Decoder& decoder = *bound.decoder;
  const Numbers<float> states(hidden, "hidden", 2), result(output, "output", 2, true);
  states.expect(1, decoder.shape().hidden_size);
  result.expect(0, states.size());
  result.expect(1, decoder.shape().vocab_size);
  const py::gil_scoped_release released;
  decoder.logits(states.data(), states.size(), result.data());
}

py::bytes read_kv(const BoundDecoder& bound, const py::object& table, std::int64_t begin, std::int64_t end) {
  const fs::Decoder& decoder = *bound.decoder;
  const Numbers<std::int32_t> blocks(table, "table", 1);
  const fs::CachedTokens tokens{blocks.data(), blocks.size(), begin, end};
  const std::size_t size_bytes = decoder.kv_bytes(tokens, decoder.layer_count());
  // Nobody else sees the bytes before they are filled.
  PyObject* const made = PyBytes_FromStringAndSize(nullptr, static_cast<py::ssize_t>(size_bytes));
  if (made == nullptr) throw py::error_already_set();
  auto result = py::reinterpret_steal<py::bytes>(made);
  char* const to = PyBytes_AS_STRING(made);
  {
    const py::gil_scoped_release released;
    decoder.read_kv(tokens, reinterpret_cast<std::byte*>(to));
  }
  return result;
}

void write_kv(BoundDecoder& bound, const py::object& table, std::int64_t begin, std::int64_t end,
              std::int64_t first_layer, const py::object& data) {
  const Numbers<std::int32_t> blocks(table, "table", 1);
  if (data.is_none()) throw py::type_error("data: bytes expected");
  const Numbers<std::uint8_t> bytes(data, "data", 1);
  if (first_layer < 0) throw py::value_error("first_layer is negative");
  const fs::CachedTokens tokens{blocks.data(), blocks.size(), begin, end};
  const py::gil_scoped_release released;
  bound.decoder->write_kv(tokens, static_cast<std::size_t>(first_layer),
                          reinterpret_cast<const std::byte*>(bytes.data()), bytes.size());
}

}  // namespace

void bind_decoder(py::module_& module) {
  py::class_<BoundDecoder>(module, "Decoder")
      .def(py::init(&bind), py::kw_only(), py::arg("hidden_size"), py::arg("head_count"), py::arg("kv_head_count"),
           py::arg("head_dim"), py::arg("ffn_size"), py::arg("vocab_size"), py::arg("norm_eps"),
           py::arg("inverse_frequencies"), py::arg("rotary_factors"), py::arg("layers"), py::arg("windows"),
           py::arg("turns"), py::arg("embedding"), py::arg("final_norm"), py::arg("head"), py::arg("attention_scale"),
           py::arg("attention_softcap"), py::arg("embedding_scale"), py::arg("residual_scale"), py::arg("gelu"),
           py::arg("kv_dtype"), py::arg("block_count"), py::arg("block_tokens"), py::arg("threads"),
           py::arg("isa") = "auto")
      .def_property_readonly("isa", [](const BoundDecoder& bound) { return bound.decoder->isa(); })
      .def("step", &step, py::kw_only(), py::arg("tokens"), py::arg("hidden"), py::arg("positions"), py::arg("starts"),
           py::arg("tables"), py::arg("logits_rows"), py::arg("output"))
      .def("logits", &logits, py::kw_only(), py::arg("hidden"), py::arg("output"))
      .def("read_kv", &read_kv, py::arg("table"), py::arg("begin"), py::arg("end"))
      .def("write_kv", &write_kv, py::arg("table"), py::arg("begin"), py::arg("end"), py::arg("first_layer"),
           py::arg("data"));
}
