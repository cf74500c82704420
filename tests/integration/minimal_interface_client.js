// A client of rl_inference.PolicyInference that shares no code with the server: one good call, then one that is refused.
// Usage: node minimal_interface_client.js PROTO ADDRESS REQUEST_AS_JSON

const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [proto, address, request] = process.argv.slice(2);
const loaded = grpc.loadPackageDefinition(loader.loadSync(proto, { keepCase: true }));
const client = new loaded.rl_inference.PolicyInference(address, grpc.credentials.createInsecure());
const deadline = () => new Date(Date.now() + 20000);

client.Generate(JSON.parse(request), { deadline: deadline() }, (error, reply) => {
  if (error) throw error;
  client.Generate({ request_id: "empty", max_new_tokens: 1 }, { deadline: deadline() }, (refusal) => {
    console.log(JSON.stringify([reply, { code: refusal.code, details: refusal.details }]));
    client.close();
  });
});
