// Runs a model that paddle.jit.save exported, in C++ and without Python code:
//
//   predictor LIBRARY MODEL INPUT OUTPUT SIZE...
//
// LIBRARY is what paddle_fused.library_path() returns, MODEL the prefix given to paddle.jit.save.
// INPUT holds raw float32 numbers of shape SIZE...; the first output goes to OUTPUT likewise.
// docs/deploy.md says how to compile it.
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "paddle/fluid/pir/dialect/operator/ir/op_dialect.h"
#include "paddle/jit/all.h"
#include "paddle/phi/api/all.h"
#include "paddle/phi/api/ext/op_meta_info.h"

// libpaddle.so exports these; no header in the wheel declares them.
namespace paddle::framework {
std::unordered_map<std::string, std::vector<OpMetaInfo>> LoadOpMetaInfoAndRegisterOp(
    const std::string& library);
void InitMemoryMethod();
void InitDevices();
}  // namespace paddle::framework

namespace {

// What `import paddle` does in Python.
void InitPaddle() {
  paddle::framework::InitMemoryMethod();
  paddle::framework::InitDevices();
  pir::IrContext::Instance()->GetOrRegisterDialect<paddle::dialect::OperatorDialect>();
}

void Read(const std::string& path, paddle::Tensor* tensor) {
  std::ifstream file(path, std::ios::binary);
  const auto bytes = static_cast<std::streamsize>(tensor->numel() * sizeof(float));
  if (bytes > 0) file.read(reinterpret_cast<char*>(tensor->data<float>()), bytes);
  if (!file) throw std::runtime_error("cannot read " + path + ", or it is too short");
}

void Write(const std::string& path, const paddle::Tensor& tensor) {
  std::ofstream file(path, std::ios::binary);
  const auto bytes = static_cast<std::streamsize>(tensor.numel() * sizeof(float));
  if (bytes > 0) file.write(reinterpret_cast<const char*>(tensor.data<float>()), bytes);
  if (!file) throw std::runtime_error("cannot write " + path);
}

int Run(const std::vector<std::string>& arguments) {
  InitPaddle();
  // Before the model is read: its operators have to be known by then.
  paddle::framework::LoadOpMetaInfoAndRegisterOp(arguments[0]);
  paddle::jit::Layer model = paddle::jit::Load(arguments[1], phi::CPUPlace());

  std::vector<int64_t> shape;
  for (size_t i = 4; i < arguments.size(); ++i) shape.push_back(std::stoll(arguments[i]));
  paddle::Tensor input = paddle::full(shape, 0, paddle::DataType::FLOAT32, phi::CPUPlace());
  Read(arguments[2], &input);

  const std::vector<paddle::Tensor> outputs = model.forward(std::vector<paddle::Tensor>{input});
  Write(arguments[3], outputs.at(0));
  for (const int64_t size : outputs.at(0).shape()) std::cout << size << ' ';
  std::cout << std::endl;
  return EXIT_SUCCESS;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 6) {
    std::cerr << "usage: predictor LIBRARY MODEL INPUT OUTPUT SIZE...\n";
    return EXIT_FAILURE;
  }
  try {
    return Run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return EXIT_FAILURE;
  }
}
