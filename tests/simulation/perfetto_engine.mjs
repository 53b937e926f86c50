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


// A pipe that is full for now takes the rest later.
const send = (bytes) => {
  for (let sent = 0; sent < bytes.length; ) {
    try { sent += writeSync(1, bytes, sent); } catch (error) { if (error.code !== "EAGAIN") throw error; }
  }
};
const port = { postMessage: send };
sandbox.onmessage({ data: port });
const request = new context.Uint8Array(readFileSync(0));
// The engine starts up in turns to come, more of them on a busy computer; until then it refuses.
const ask = (left) => {
  try { port.onmessage({ data: request }); } catch (error) {
    if (!left) throw error;
    setTimeout(() => ask(left - 1), 50);
  }
};
setTimeout(() => ask(200), 0);
