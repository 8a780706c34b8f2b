// Continue a text, byte by byte: step PACKAGE TEXT COUNT
#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <iostream>
#include <regex>
#include <sstream>

int main(int, char** arguments) {
  c10::InferenceMode guard;
  torch::inductor::AOTIModelPackageLoader package(arguments[1]);
  std::string text = arguments[2], state = package.get_metadata()["state"];
  std::vector<at::Tensor> inputs{at::empty({1, 1}, at::kLong)};  // ids and state; zeros begin a stream
  const std::regex one(R"re("shape": \[([\d, ]*)\], "dtype": "(\w+)")re");
  for (std::sregex_iterator part(state.begin(), state.end(), one), end; part != end; ++part) {
    std::stringstream numbers(std::regex_replace((*part)[1].str(), std::regex(","), " "));
    std::vector<int64_t> shape;
    for (int64_t size; numbers >> size;) shape.push_back(size);
    inputs.push_back(at::zeros(shape, (*part)[2] == "int64" ? at::kLong : at::kFloat));
  }
  const size_t length = text.size() + std::stoul(arguments[3]);
  for (size_t place = 0; place + 1 < length; ++place) {
    inputs[0].fill_(static_cast<unsigned char>(text[place]));
    std::vector<at::Tensor> outputs = package.run(inputs);  // logits and state
    std::copy(outputs.begin() + 1, outputs.end(), inputs.begin() + 1);
    if (place + 1 == text.size()) text += static_cast<char>(outputs[0].slice(2, 0, 256).argmax().item<int64_t>());
  }
  std::cout << text << std::endl;
}
