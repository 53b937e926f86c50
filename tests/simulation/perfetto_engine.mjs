// Runs the trace processor of Perfetto's user interface: requests come on stdin, answers go to stdout, both as its
// TraceProcessorRpcStream. First argument: the folder that holds engine_bundle.js and the .wasm files.
import { readFileSync, writeSync } from "node:fs";
import { join } from "node:path";
import vm from "node:vm";

const folder = process.argv[2];
class FileRequest {
  open(_, url) { this.name = String(url).split("/").pop(); }
  send() {
    const bytes = readFileSync(join(folder, this.name));
    this.response = new context.Uint8Array(bytes).buffer;
    this.status = 200;
  }
}
const quiet = () => {};
const sandbox = {
  console: { log: quiet, warn: (text) => process.stderr.write(text + "\n"), error: quiet },
  XMLHttpRequest: FileRequest, setTimeout, clearTimeout, TextDecoder, TextEncoder, performance, URL,
  crypto: globalThis.crypto,
  WorkerGlobalScope: class {},
};
sandbox.self = sandbox;
sandbox.location = { href: "http://engine/engine_bundle.js" };
const context = vm.createContext(sandbox);
context.Uint8Array = vm.runInContext("Uint8Array", context);
vm.runInContext("delete WebAssembly.instantiateStreaming", context);
vm.runInContext(readFileSync(join(folder, "engine_bundle.js"), "utf8"), context);


const port = { postMessage: (bytes) => { for (let sent = 0; sent < bytes.length; ) sent += writeSync(1, bytes, sent); } };
sandbox.onmessage({ data: port });
const request = new context.Uint8Array(readFileSync(0));
// Once the engine has compiled, which it does at once, its start-up goes on in the next turn.
setTimeout(() => port.onmessage({ data: request }), 0);
