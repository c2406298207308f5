// What C++'s std::regex finds, for tests/unit/data/std_regex.txt: that is the engine that
// llama.cpp gives the patterns of --override-tensor to. To renew the file after adding to it:
//
//   g++ -O1 -o /tmp/std_regex tests/support/std_regex.cpp
//   /tmp/std_regex < tests/unit/data/std_regex.txt > /tmp/new && mv /tmp/new tests/unit/data/std_regex.txt
//
// Input and output: names, one a line; an empty line; then RESULT, space, PATTERN, where
// RESULT is one digit a name (1: found) or `error`. The RESULT that is read is not used.

#include <iostream>
#include <regex>
#include <string>
#include <vector>

int main() {
    std::string line;
    std::vector<std::string> names;
    while (std::getline(std::cin, line) && !line.empty()) {
        names.push_back(line);
        std::cout << line << '\n';
    }
    std::cout << '\n';
    while (std::getline(std::cin, line)) {
        const std::string pattern = line.substr(line.find(' ') + 1);
        std::string result;
        try {
            const std::regex compiled(pattern);
            for (const std::string & name : names) {
                result += std::regex_search(name, compiled) ? '1' : '0';
            }
        } catch (const std::regex_error &) {
            result = "error";
        }
        std::cout << result << ' ' << pattern << '\n';
    }
}
