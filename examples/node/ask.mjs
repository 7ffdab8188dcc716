// Ask a running system from Node.js, from the protos alone: `openbook up`, `npm install` in this folder, then
//
//   node ask.mjs "who invented the telephone?" [127.0.0.1:9000]
//
// The answer's tokens as they are decided, then each passage with its prior and posterior.
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const [question, server = "127.0.0.1:9000"] = process.argv.slice(2);
const protos = fileURLToPath(new URL("../../protos", import.meta.url));
const asTheyAre = { includeDirs: [protos], keepCase: true, longs: Number, defaults: true };
const definition = loader.loadSync("openbook/v1/answer.proto", asTheyAre);
const { AnswerService } = grpc.loadPackageDefinition(definition).openbook.v1;
const client = new AnswerService(server, grpc.credentials.createInsecure());

const metadata = new grpc.Metadata();
if (process.env.OPENBOOK_API_KEY) metadata.set("authorization", `Bearer ${process.env.OPENBOOK_API_KEY}`);

// FORMULATION_TOKEN with one beam decides token by token.
const request = { question, k: 3, formulation: "FORMULATION_TOKEN", n_beams: 1, timeout_s: 60 };
const stream = client.AnswerStream(request, metadata, { deadline: Date.now() + 61_000 });
stream.on("data", ({ token, answer }) => {
  if (token) process.stdout.write(token.text);
  if (answer) {
    console.log(`\n${answer.answer}   p(y|x) = ${Math.exp(answer.log_likelihood).toFixed(3)}`);
    for (const { passage, log_prior, log_posterior } of answer.evidence) {
      const [prior, posterior] = [log_prior, log_posterior].map((log) => Math.exp(log).toFixed(3));
      console.log(`  prior ${prior}  posterior ${posterior}  ${passage.title}`);
    }
  }
});
stream.on("error", (error) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
